// Distributions that one can click into: bars of shares and histograms, made of buttons.
"use strict";

{
  // A list of bars, the most frequent first.
  // entries: [label, of all, of those selected, chosen?, on click].
  viewer.bars = function (title, entries, { most = 12 } = {}) {
    const largest = Math.max(1, ...entries.map((entry) => entry[1]));
    const shown = entries.slice(0, most);
    const list = element("ul", { class: "bars" });
    for (const [label, all, selected, chosen, click] of shown) {
      list.append(element("li", {}, bar(label, all, selected, chosen, click, largest)));
    }
    const rest = entries.length - shown.length;
    const more = rest ? element("p", { class: "hint" }, `and ${rest} more`) : null;
    return facet(title, list, more);
  };

  function bar(label, all, selected, chosen, click, largest) {
    const fill = element("span", { class: "fill" });
    const back = element("span", { class: "back" });
    fill.style.width = `${(100 * selected) / largest}%`;
    back.style.width = `${(100 * all) / largest}%`;
    const name = viewer.plainText(label || "none");
    return element(
      "button",
      { type: "button", class: "bar", onclick: click, "aria-pressed": String(Boolean(chosen)) },
      element("span", { class: "track", "aria-hidden": "true" }, back, fill),
      element("span", { class: "label", title: name }, name),
      element("span", { class: "number" }, thousands(selected)),
    );
  }

  function facet(title, ...contents) {
    return element("section", { class: "facet" }, element("h3", {}, title), contents);
  }

  // A histogram of a number over rows.
  // chosen: [low, high] or null; click gets "LOW..HIGH", or "" to take it back.
  viewer.histogram = function (title, values, all, selected, chosen, click) {
    const bins = binsOf(values, all);
    if (!bins) return null;
    const counts = countIn(bins, values, all);
    const kept = countIn(bins, values, selected);
    const edges = edgesIn(bins, values, all);
    const largest = Math.max(1, ...counts);
    const columns = element("div", { class: "columns" });
    counts.forEach((count, k) => {
      const [low, high] = edges[k];
      const isChosen = chosen && low >= chosen[0] && high <= chosen[1];
      const what = !count ? "nothing" : low === high ? viewer.short(low) : `${viewer.short(low)} to ${viewer.short(high)}`;
      const back = element("span", { class: "back" });
      const fill = element("span", { class: "fill" });
      // A bin that is not empty is seen.
      back.style.height = `${count ? Math.max(3, (100 * count) / largest) : 0}%`;
      fill.style.height = `${kept[k] ? Math.max(3, (100 * kept[k]) / largest) : 0}%`;
      const name = `${title} ${what}: ${plural(kept[k], "episode")} of ${count}`;
      const button = element(
        "button",
        {
          type: "button", class: "column", title: name, "aria-label": name,
          "aria-pressed": String(Boolean(isChosen)), disabled: !count,
          onclick: () => click(isChosen ? "" : `${low}..${high}`),
        },
        back, fill,
      );
      columns.append(button);
    });
    const ends = element(
      "div", { class: "ends" },
      element("span", {}, viewer.short(bins.low)),
      element("span", {}, meanText(values, selected)),
      element("span", {}, viewer.short(bins.high)),
    );
    return facet(title, columns, ends);
  };

  function meanText(values, rows) {
    let sum = 0;
    let count = 0;
    for (const i of rows) {
      if (Number.isFinite(values[i])) {
        sum += values[i];
        count += 1;
      }
    }
    return count ? `mean ${viewer.short(sum / count)}` : "";
  }

  // Bins of a number: one for each where it is a count of few, else 20 of one width.
  function binsOf(values, rows) {
    let low = Infinity;
    let high = -Infinity;
    let whole = true;
    for (const i of rows) {
      const value = values[i];
      if (!Number.isFinite(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
      whole = whole && Number.isInteger(value);
    }
    if (low > high) return null;
    if (whole && high - low < 24) return { low, high, number: high - low + 1, whole: true };
    const number = low === high ? 1 : 20;
    return { low, high, number, whole: false };
  }

  function placeIn(bins, value) {
    if (bins.whole) return value - bins.low;
    if (bins.low === bins.high) return 0;
    const share = (value - bins.low) / (bins.high - bins.low);
    return Math.min(bins.number - 1, Math.floor(share * bins.number));
  }

  // The lowest and the highest value in each bin: what its filter asks for.
  function edgesIn(bins, values, rows) {
    const edges = Array.from({ length: bins.number }, () => [Infinity, -Infinity]);
    for (const i of rows) {
      if (!Number.isFinite(values[i])) continue;
      const edge = edges[placeIn(bins, values[i])];
      if (values[i] < edge[0]) edge[0] = values[i];
      if (values[i] > edge[1]) edge[1] = values[i];
    }
    return edges;
  }

  function countIn(bins, values, rows) {
    const counts = new Array(bins.number).fill(0);
    for (const i of rows) {
      if (Number.isFinite(values[i])) counts[placeIn(bins, values[i])] += 1;
    }
    return counts;
  }

  // A run may have more steps than a column of the page has pixels.
  const MOST_COLUMNS = 60;

  // Mean of a number by step, a column a step, or several where there are many; click gets the
  // step, or "FIRST..LAST", or "" to take it back.
  viewer.bySteps = function (title, values, rows, chosen, click) {
    const parts = partsOfSteps(values, rows);
    const finite = parts.map((part) => part.mean).filter(Number.isFinite);
    if (!finite.length) return null;
    const [low, high] = [Math.min(0, ...finite), Math.max(...finite)];
    const columns = element("div", { class: "columns" });
    for (const { first, last, mean } of parts) {
      const fill = element("span", { class: "fill" });
      const share = high > low ? (mean - low) / (high - low) : 1;
      fill.style.height = Number.isFinite(mean) ? `${Math.max(3, 100 * share)}%` : "0";
      const asked = first === last ? String(first) : `${first}..${last}`;
      const isChosen = chosen === asked;
      const steps = first === last ? `step ${first}` : `steps ${first} to ${last}`;
      const name = `${steps}: mean ${title} ${viewer.short(mean)}`;
      columns.append(
        element(
          "button",
          {
            type: "button", class: "column", title: name, "aria-label": name,
            "aria-pressed": String(isChosen),
            onclick: () => click(isChosen ? "" : asked),
          },
          fill,
        ),
      );
    }
    const ends = element(
      "div", { class: "ends" },
      element("span", {}, `step ${parts[0].first}`),
      element("span", {}, `${viewer.short(low)} to ${viewer.short(high)}`),
      element("span", {}, `step ${parts.at(-1).last}`),
    );
    return facet(`${title} by step`, columns, ends);
  };

  // [{first, last, mean}]: steps that follow each other, in MOST_COLUMNS parts at most.
  function partsOfSteps(values, rows) {
    const sums = new Map();
    for (const i of rows) {
      const step = viewer.table.step[i];
      const entry = sums.get(step) || [0, 0];
      if (Number.isFinite(values[i])) {
        entry[0] += values[i];
        entry[1] += 1;
      }
      sums.set(step, entry);
    }
    const steps = [...sums.keys()].sort((a, b) => a - b);
    const size = Math.ceil(steps.length / MOST_COLUMNS);
    const parts = [];
    for (let k = 0; k < steps.length; k += size) {
      const together = steps.slice(k, k + size);
      const entries = together.map((step) => sums.get(step));
      const sum = entries.reduce((total, entry) => total + entry[0], 0);
      const count = entries.reduce((total, entry) => total + entry[1], 0);
      parts.push({ first: together[0], last: together.at(-1), mean: sum / count });
    }
    return parts;
  }
}
