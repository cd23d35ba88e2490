// The list: all episodes that the address asks for, of which only those in sight are elements.
"use strict";

{
  const ROW_HEIGHT = 34;
  // Rows above and below those in sight.
  const MARGIN_ROWS = 12;
  const REDRAW_MS = 100;
  // While texts are looked into, the rows are drawn again so seldom that it costs little.
  const RECOUNT_MS = 300;
  const SORTS = {
    step: "step", reward: "reward", advantage: "advantage", tokens: "tokens", turns: "turns",
    mismatch: "mismatch", ratio: "ratio", entropy: "entropy", kl: "KL", gradient: "gradient",
    seconds: "seconds", env_seconds: "environment's seconds", engine_seconds: "engine's seconds",
    attempts: "times played", rows: "rows",
  };
  // Orders that are colours of tokens, too.
  const COLORED = ["mismatch", "ratio", "entropy", "kl", "advantage"];
  const MARKS = [
    ["failed", "failed"], ["no_spread", "no spread"], ["empty", "empty"], ["stale", "stale"],
    ["cut", "cut"], ["masked", "masked"],
  ];

  // All episodes, for those who come to a page by its address.
  viewer.listAll = function () {
    if (!viewer.listed.rows.length) viewer.listed.rows = viewer.select([], null);
  };

  // What the list shows now; arrows on an episode's page go along `rows`.
  viewer.listed = { rows: [], values: {}, found: null };

  viewer.views.list = async function (main, { values }) {
    const listed = { rows: [], values, found: viewer.listed.found };
    listed.columns = viewer.columnsOf(values);
    viewer.listed = listed;
    viewer.asked = values;
    document.title = "Episodes";
    if (!values.text) listed.found = null;
    else if (!listed.found || listed.found.text !== values.text) {
      viewer.announce("searching");
      listed.found = await viewer.search(values.text);
      if (viewer.listed !== listed) return;
    }
    const parts = frame(main, listed);
    refresh(listed, parts);
    if (listed.columns.includes("answer") && !viewer.answers) {
      viewer.loadAnswers().then(() => parts.body.isConnected && draw(listed, parts));
    }
    const isLooked = listed.found ? verifyAll(listed, parts) : Promise.resolve();
    isLooked.then(viewer.readTexts);
  };

  function change(listed, changes) {
    const values = { ...listed.values, ...changes };
    location.hash = viewer.listAddress(values);
  }

  function frame(main, listed) {
    const status = element("p", { class: "status", role: "status" });
    const chips = element("div", { class: "chips" });
    const head = element("div", { class: "list-head", role: "row" });
    const body = element("div", { class: "list-body", role: "rowgroup", tabindex: "-1" });
    const scroll = element("div", { class: "list-scroll", tabindex: "-1" }, head, body);
    const grid = element("div", { class: "list", role: "table", "aria-label": "Episodes" }, scroll);
    const side = element("aside", { class: "facets", "aria-label": "Distributions" });
    const open = window.innerWidth > 900;
    const fold = element("details", { class: "facets-fold", open },
      element("summary", {}, "Distributions"), side);
    const bar = element("div", { class: "list-bar" }, status, chips,
      element("a", { class: "to-tasks", href: tasksAddress(listed.values) }, "by task"),
      viewer.columnPicker(listed.values, (changes) => change(listed, changes)), sortPicker(listed));
    viewer.replace(main, element("div", { class: "list-page" }, fold,
      element("div", { class: "list-main" }, bar, grid)));
    const parts = { status, chips, head, body, scroll, side, grid };
    scroll.addEventListener("scroll", () => {
      draw(listed, parts);
      lookLater(listed, parts);
    }, { passive: true });
    new ResizeObserver(() => draw(listed, parts)).observe(scroll);
    return parts;
  }

  // The tasks of the episodes that the list shows, but for what is searched for.
  function tasksAddress({ text, sort, columns, ...filters }) {
    return viewer.address(["tasks"], filters);
  }

  function sortPicker(listed) {
    const keys = Object.keys(SORTS).filter((key) => key === "step" || viewer.table.has[key]);
    const select = element("select", { id: "sort" }, element("option", { value: "" },
      "as recorded: first step first, validations last"),
      keys.flatMap((key) => [
        element("option", { value: `-${key}` }, `${SORTS[key]}, highest first`),
        element("option", { value: key }, `${SORTS[key]}, lowest first`),
      ]));
    select.value = listed.values.sort || "";
    select.addEventListener("change", () => change(listed, { sort: select.value }));
    return element("label", { class: "sort" }, "Order by ", select);
  }

  function refresh(listed, parts) {
    const tests = viewer.testsOf(listed.values);
    listed.rows = viewer.sortRows(viewer.select(tests, listed.found), listed.values.sort);
    const changed = (changes) => change(listed, changes);
    viewer.replace(parts.side, viewer.facets(listed.values, tests, listed.found, changed));
    viewer.replace(parts.chips, chipsOf(listed, changed));
    drawHead(listed, parts);
    tell(listed, parts);
    draw(listed, parts);
  }

  function tell(listed, parts) {
    const { found, rows } = listed;
    const all = thousands(viewer.table.size);
    let text = `${thousands(rows.length)} of ${all} episodes`;
    if (found && !found.isExact) {
      const open = rows.filter((i) => !found.looked[i]).length;
      if (open) text = `at most ${text}, ${thousands(open)} still to be looked into`;
    }
    parts.status.textContent = text;
    parts.grid.setAttribute("aria-rowcount", rows.length + 1);
  }

  function chipsOf(listed, changed) {
    const chips = [];
    for (const [key, value] of Object.entries(listed.values)) {
      if (!value || !(Object.hasOwn(viewer.filters, key) || key === "text")) continue;
      const name = key === "text" ? "text" : viewer.filters[key][0];
      const isFlag = value === "1" && viewer.filters[key]?.[1].length === 1;
      const what = isFlag ? name : `${name} ${shortValue(key, value)}`;
      chips.push(element("button",
        { type: "button", class: "chip", onclick: () => changed({ [key]: "" }),
          "aria-label": `remove the filter ${viewer.plainText(what)}` },
        viewer.plainText(what), element("span", { "aria-hidden": "true" }, " ✕")));
    }
    return chips;
  }

  function shortValue(key, value) {
    if (key === "task") return value.slice(0, 6);
    if (key === "solved") return viewer.taskClasses[value] || value;
    const [low, high] = value.split("..");
    if (high === undefined || Number.isNaN(Number(low))) return value;
    const [first, last] = [viewer.short(Number(low)), viewer.short(Number(high))];
    return first === last ? first : `${first} to ${last}`;
  }

  function drawHead(listed, parts) {
    const sort = listed.values.sort || "";
    const cells = listed.columns.map((key) => {
      const { label, sentence, isSortable } = viewer.columnHead(key);
      if (!isSortable) {
        return element("div", { class: `cell c-${key}`, role: "columnheader", title: sentence },
          label);
      }
      const isSorted = sort.replace(/^-/, "") === key;
      const descends = sort.startsWith("-");
      const next = isSorted && descends ? key : isSorted ? "" : `-${key}`;
      const order = isSorted ? (descends ? "descending" : "ascending") : "none";
      const arrow = isSorted ? (descends ? " ↓" : " ↑") : "";
      return element("div", { class: `cell c-${key}`, role: "columnheader", "aria-sort": order },
        element("button", { type: "button", title: sentence,
          onclick: () => change(listed, { sort: next }) }, label + arrow));
    });
    viewer.replace(parts.head, cells);
    const { grid, least } = viewer.columnWidths(listed.columns);
    parts.grid.style.setProperty("--columns", grid);
    parts.grid.style.setProperty("--least", `${least}px`);
  }

  // Draws the rows in sight.
  function draw(listed, parts) {
    const { rows } = listed;
    parts.body.style.height = `${Math.max(1, rows.length) * ROW_HEIGHT}px`;
    // However tall a style makes the list, a window shows no more than its own height.
    const height = Math.min(parts.scroll.clientHeight || 600, window.innerHeight);
    const first = Math.max(0, Math.floor(parts.scroll.scrollTop / ROW_HEIGHT) - MARGIN_ROWS);
    const last = Math.min(rows.length, first + Math.ceil(height / ROW_HEIGHT) + 2 * MARGIN_ROWS);
    const focused = document.activeElement?.closest?.(".list-row")?.dataset.place;
    const shownRows = [];
    for (let place = first; place < last; place += 1) shownRows.push(rowOf(listed, place));
    const top = Math.floor(parts.scroll.scrollTop / ROW_HEIGHT);
    listed.inSight = rows.slice(top, top + Math.ceil(height / ROW_HEIGHT));
    if (!rows.length) {
      shownRows.push(element("p", { class: "nothing" }, whyNothing(listed)));
    }
    viewer.replace(parts.body, shownRows);
    if (focused !== undefined) focusRow(parts.body, focused);
  }

  function whyNothing(listed) {
    if (!viewer.table.size && viewer.table.manifest.goes_on) {
      return "The run has just begun. Its episodes come here as it goes on: load the page again.";
    }
    if (!viewer.table.size) return "No episodes were found.";
    const ofSearch = " A search finds what one message, answer or error holds, not what reaches "
      + "from one into the next.";
    return `No episode passes these filters.${listed.values.text ? ofSearch : ""}`;
  }

  function focusRow(body, place) {
    body.querySelector(`.list-row[data-place="${place}"]`)?.focus({ preventScroll: true });
  }

  function rowOf(listed, place) {
    const i = listed.rows[place];
    const cells = listed.columns.map((key) => cellOf(listed, key, i));
    const href = viewer.episodeAddress(i, { color: colorOf(listed.values) });
    const row = element("a", { class: "list-row", role: "row", href,
      "data-place": place, "aria-rowindex": place + 2 }, cells);
    row.style.top = `${place * ROW_HEIGHT}px`;
    return row;
  }

  function cellOf(listed, key, i) {
    if (key === "ending") {
      const ending = viewer.plainText(viewer.textOf("ending", i));
      return element("div", { class: "cell c-ending", role: "cell", title: ending }, ending);
    }
    if (key === "text") {
      return element("div", { class: "cell c-text", role: "cell" }, marksOf(i), textCell(listed, i));
    }
    const cell = element("div", { class: `cell c-${key}`, role: "cell" }, viewer.columnText(key, i));
    if (key !== "step") return cell;
    if (viewer.table.hasKinds) {
      const kind = viewer.table.val[i] ? "val" : "train";
      cell.append(element("span", { class: `tag k-${kind}` }, kind));
    }
    if (viewer.table.manifest.runs.length > 1) {
      cell.prepend(element("span", { class: "tag run" }, `run ${viewer.table.run[i]}`));
    }
    return cell;
  }

  // What an episode's tokens are coloured by when it is opened: what the list asks for.
  function colorOf(values) {
    if (values.fate || values.spread || values.cut || values.masked) return "fate";
    if (values.stale) return "version";
    const key = (values.sort || "").replace(/^-/, "");
    return COLORED.includes(key) ? key : "";
  }

  function textCell(listed, i) {
    const snippet = listed.found?.snippets.get(i);
    if (snippet) {
      const [before, hit, after] = snippet;
      return [viewer.visible(before), element("mark", {}, viewer.visible(hit)),
        viewer.visible(after)];
    }
    return viewer.visible(viewer.textOf("beginning", i).replace(/\s+/g, " "));
  }

  function marksOf(i) {
    const marks = MARKS.filter(([name]) => viewer.table[name][i]).map(([name, label]) =>
      element("span", { class: `tag m-${name}` }, label));
    if (viewer.table.rows[i] > 1) {
      const rows = plural(viewer.table.rows[i], "row");
      marks.push(element("span", { class: "tag" }, rows));
    }
    if (viewer.table.attempts[i] > 1) marks.push(element("span", { class: "tag" }, "refilled"));
    return marks;
  }

  // Rows that come into sight say where they hold the text.
  function lookLater(listed, parts) {
    if (!listed.found) return;
    clearTimeout(listed.looking);
    listed.looking = setTimeout(() => lookIntoSight(listed, parts), REDRAW_MS);
  }

  // Looks into the texts: of the rows in sight first, then, where the index does not know which
  // rows hold the text, of all that it found.
  async function verifyAll(listed, parts) {
    const { found } = listed;
    const isCurrent = isCurrentOf(listed, parts);
    let drawn = performance.now();
    const progress = () => {
      const now = performance.now();
      if (now - drawn < RECOUNT_MS) return;
      listed.rows = listed.rows.filter((i) => found.candidates[i]);
      tell(listed, parts);
      draw(listed, parts);
      listed.isSettled = listed.isSettled || listed.inSight.every((i) => found.looked[i]);
      drawn = performance.now();
    };
    await viewer.verify(found, listed.inSight, { isShown: true, progress, isCurrent });
    if (!found.isExact) {
      await viewer.verify(found, listed.rows, { progress, isCurrent });
      if (isCurrent()) refresh(listed, parts);
    }
    await lookIntoSight(listed, parts);
    listed.isSettled = true;
  }

  const isCurrentOf = (listed, parts) => () =>
    viewer.listed === listed && parts.body.isConnected;

  // Looks into the texts of the rows in sight until all of them hold what is looked for.
  async function lookIntoSight(listed, parts) {
    const { found } = listed;
    const isCurrent = isCurrentOf(listed, parts);
    const isOpen = (i) => !found.looked[i] || !found.snippets.has(i);
    const asked = { isShown: true, progress: () => {}, isCurrent };
    draw(listed, parts);
    while (isCurrent() && listed.inSight.some(isOpen)) {
      await viewer.verify(found, listed.inSight, asked);
      if (!isCurrent()) return;
      listed.rows = listed.rows.filter((i) => found.candidates[i]);
      tell(listed, parts);
      draw(listed, parts);
    }
  }

  // Up and down move along the rows.
  viewer.moveInList = function (by) {
    const body = document.querySelector(".list-body");
    const scroll = document.querySelector(".list-scroll");
    if (!body) return;
    const current = document.activeElement?.closest?.(".list-row");
    const place = current ? Number(current.dataset.place) + by : 0;
    if (place < 0 || place >= viewer.listed.rows.length) return;
    const top = place * ROW_HEIGHT;
    const view = scroll.clientHeight - 3 * ROW_HEIGHT;
    if (top < scroll.scrollTop) scroll.scrollTop = top;
    else if (top > scroll.scrollTop + view) scroll.scrollTop = top - view;
    requestAnimationFrame(() => focusRow(body, place));
  };
}
