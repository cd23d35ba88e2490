// The way from reward to gradient: stages, the group, the turns, as the builder worked them out
// (features/viewer/credit_path.py).
"use strict";

{
  viewer.pathView = function (episode) {
    const { path } = episode;
    const section = element("section", { class: "path", "aria-label": "From reward to gradient" },
      element("h2", {}, "From reward to gradient"));
    if (path.estimator) {
      section.append(element("p", { class: "formula" },
        element("strong", {}, viewer.plainText(path.estimator)),
        path.formula ? `: advantage = ${path.formula}` : ""));
    } else {
      section.append(element("p", { class: "hint" }, "No update was recorded for it."));
    }
    section.append(stages(path.stages));
    for (const note of path.notes || []) {
      section.append(element("p", { class: "note" }, viewer.plainText(note)));
    }
    if (path.check?.agrees) {
      const difference = viewer.short(path.check.difference);
      section.append(element("p", { class: "hint" },
        `Computed again from the recorded rewards, the advantages are the same `
        + `(largest difference ${difference}).`));
    }
    if (path.members && path.members.rows.length > 1) section.append(members(episode, path.members));
    if (path.turns) section.append(turns(path.turns));
    return section;
  };

  function stages(entries) {
    return element("table", { class: "stages" }, element("tbody", {},
      entries.map(([label, value, sentence]) =>
        element("tr", {},
          element("th", { scope: "row" }, label, element("small", {}, sentence)),
          element("td", { "data-stage": label, "data-value": String(value) },
            viewer.short(value))))));
  }

  // The group's scores, with the mean as a line.
  function members(episode, { rows }) {
    const scores = rows.map((row) => row.score).filter(Number.isFinite);
    const low = Math.min(0, ...scores);
    const high = Math.max(low + 1e-9, ...scores);
    const share = (value) => `${(100 * (value - low)) / (high - low)}%`;
    const counting = rows.filter((row) => row.counts);
    const mean = counting.reduce((sum, row) => sum + row.score, 0) / Math.max(1, counting.length);
    const lines = rows.map((row) => {
      const bar = element("span", { class: "score-bar" });
      const fill = element("span", { class: "fill" });
      fill.style.width = share(row.score);
      const middle = element("span", { class: "mean" });
      middle.style.left = share(mean);
      bar.append(fill, middle);
      const isOwn = row.episode_id === episode.id;
      const i = placeBeside(episode, row.episode_id);
      const name = viewer.plainText(shortId(row.episode_id));
      return element("tr", { class: isOwn ? "own" : null },
        element("th", { scope: "row", title: viewer.plainText(row.episode_id) },
          isOwn ? "this one" : i === undefined ? name
            : element("a", { href: viewer.episodeAddress(i) }, name)),
        element("td", { class: "wide" }, bar),
        element("td", {}, viewer.short(row.score)),
        element("td", {}, row.counts ? viewer.short(row.deviation) : "left out"),
        element("td", {}, viewer.short(row.advantage)));
    });
    return element("div", {},
      element("h3", {}, "Its group ",
        element("a", { href: viewer.groupAddress(episode.place) }, "side by side")),
      element("table", { class: "members" },
        element("thead", {}, element("tr", {}, ["episode", "", "score", "− mean", "advantage"]
          .map((name) => element("th", { scope: "col" }, name)))),
        element("tbody", {}, lines)));
  }

  function placeBeside(episode, id) {
    const { table } = viewer;
    const kind = table.val[episode.place] ? "val" : "train";
    const key = [table.run[episode.place], kind, table.step[episode.place], String(id).toWellFormed()];
    return table.places.get(key.join("/"));
  }

  const shortId = (id) => (id.length > 18 ? `…${id.slice(-16)}` : id);

  function turns({ columns, rows }) {
    return element("div", {},
      element("h3", {}, "Turn by turn"),
      element("div", { class: "scroll" }, element("table", { class: "turn-table" },
        element("thead", {}, element("tr", {}, columns.map(([name, sentence]) =>
          element("th", { scope: "col", title: sentence }, name)))),
        element("tbody", {}, rows.map((row) => element("tr", {},
          row.map((value) => element("td", { title: viewer.short(value, 6) },
            narrow(value)))))))));
  }

  // A number in few letters, so that all columns of turns have room; the title has more digits.
  function narrow(value) {
    if (typeof value !== "number" || value === 0 || Math.abs(value) >= 1e-3) {
      return viewer.short(value, 3);
    }
    return value.toExponential(1).replaceAll("-", "−");
  }
}
