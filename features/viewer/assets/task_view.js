// The same task over steps and runs: how its rewards went, and its episodes beside each other.
"use strict";

{
  const SVG = "http://www.w3.org/2000/svg";
  const [WIDTH, HEIGHT, MARGIN] = [860, 200, 52];
  const MOST_BESIDE = 6;

  viewer.views.task = async function (main, { parts, values }) {
    const rows = [];
    for (const i of viewer.table.order) {
      if (viewer.textOf("task", i) === parts[0]) rows.push(i);
    }
    document.title = "The same task";
    if (!rows.length) {
      viewer.replace(main, element("section", { class: "fault" },
        element("h2", {}, "No episode of this task is in the viewer."),
        element("a", { href: "#list" }, "All episodes")));
      return;
    }
    const chosen = (values.show || "").split(",").filter(Boolean).map(Number)
      .filter((i) => rows.includes(i)).slice(0, MOST_BESIDE);
    viewer.asked = values;
    const passAt = viewer.passAt(values);
    const meetings = meetingsOf(rows, passAt);
    const article = element("article", { class: "task" },
      element("nav", { "aria-label": "Place" },
        element("a", { href: viewer.listAddress(viewer.listed.values) }, "List"), " › ",
        element("a", { href: "#tasks" }, "tasks"), " › ",
        element("a", { href: viewer.listAddress({ task: parts[0] }) }, "all its episodes")),
      element("h1", {}, "The same task, ", plural(meetings.length, "time")),
      element("p", { class: "said" }, viewer.taskWords(rows[0])),
      meetings.length > 1 ? chart(meetings) : null,
      table(meetings, chosen, parts[0]));
    if (chosen.length) {
      article.append(element("h2", {}, "Beside each other"),
        await viewer.besideEachOther(chosen));
    }
    viewer.replace(main, article);
  };

  // When the task was met: the episodes of one run, kind and step.
  function meetingsOf(rows, passAt) {
    const { table } = viewer;
    const found = new Map();
    for (const i of rows) {
      const key = `${table.run[i]}/${table.val[i]}/${table.step[i]}`;
      if (!found.has(key)) {
        found.set(key, { run: table.run[i], val: table.val[i], step: table.step[i], rows: [] });
      }
      found.get(key).rows.push(i);
    }
    const meetings = [...found.values()];
    for (const meeting of meetings) {
      meeting.rows.sort((a, b) => table.reward[b] - table.reward[a]);
      const rewards = meeting.rows.map((i) => table.reward[i]);
      meeting.mean = rewards.reduce((sum, one) => sum + one, 0) / rewards.length;
      meeting.solved = meeting.rows.filter((i) => viewer.isSolved(i, passAt)).length;
      [meeting.high, meeting.low] = [rewards[0], rewards.at(-1)];
    }
    return meetings.sort((a, b) => a.step - b.step || a.val - b.val || a.run - b.run);
  }

  function table(meetings, chosen, key) {
    const boxes = (meeting) => meeting.rows.slice(0, 40).map((i) => {
      const box = element("input", { type: "checkbox", checked: chosen.includes(i),
        "aria-label": `put beside the others: reward ${viewer.short(viewer.table.reward[i])}` });
      box.addEventListener("change", () => {
        const next = box.checked ? [...chosen, i] : chosen.filter((one) => one !== i);
        location.hash = viewer.address(["task", key], { show: next.slice(-MOST_BESIDE).join(",") });
      });
      return element("span", { class: "pick" }, box,
        element("a", { href: viewer.episodeAddress(i) }, viewer.short(viewer.table.reward[i])));
    });
    const several = viewer.table.manifest.runs.length > 1;
    const heads = [several ? "run" : null, "step", "solved", "mean", "lowest", "highest",
      `episodes (choose up to ${MOST_BESIDE} to put beside each other)`].filter(Boolean);
    return element("div", { class: "scroll" }, element("table", { class: "meetings" },
      element("thead", {}, element("tr", {},
        heads.map((name) => element("th", { scope: "col" }, name)))),
      element("tbody", {}, meetings.map((meeting) => element("tr", {},
        several ? element("td", {}, String(meeting.run)) : null,
        element("td", {}, element("a", { href: viewer.groupAddress(meeting.rows[0]) },
          `${meeting.val ? "val " : ""}${meeting.step}`)),
        element("td", {}, `${meeting.solved} of ${meeting.rows.length}`),
        element("td", {}, viewer.short(meeting.mean)),
        element("td", {}, viewer.short(meeting.low)),
        element("td", {}, viewer.short(meeting.high)),
        element("td", { class: "picks" }, boxes(meeting)))))));
  }

  function svg(tag, attributes, text) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text) node.textContent = text;
    return node;
  }

  // Mean rewards over steps with their range, a mark a run: circle, square, triangle.
  function chart(meetings) {
    const steps = meetings.map((meeting) => meeting.step);
    const low = Math.min(...meetings.map((meeting) => meeting.low));
    const high = Math.max(...meetings.map((meeting) => meeting.high));
    const [first, last] = [Math.min(...steps), Math.max(...steps)];
    const x = (step) => MARGIN + ((step - first) / (last - first || 1)) * (WIDTH - 2 * MARGIN);
    const y = (reward) => HEIGHT - MARGIN - ((reward - low) / (high - low || 1))
      * (HEIGHT - 2 * MARGIN);
    const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", class: "chart",
      "aria-label": "Rewards of the task over steps" });
    for (const [value, anchor] of [[low, HEIGHT - MARGIN], [high, MARGIN]]) {
      drawing.append(svg("line", { x1: MARGIN, x2: WIDTH - MARGIN, y1: anchor, y2: anchor,
        class: "axis" }));
      drawing.append(svg("text", { x: MARGIN - 6, y: anchor + 4, class: "end" },
        viewer.short(value)));
    }
    drawing.append(svg("text", { x: x(first), y: HEIGHT - 10 }, `step ${first}`));
    drawing.append(svg("text", { x: x(last), y: HEIGHT - 10, class: "end" }, `step ${last}`));
    for (const meeting of meetings) {
      drawing.append(svg("line", { x1: x(meeting.step), x2: x(meeting.step), y1: y(meeting.low),
        y2: y(meeting.high), class: `range run${meeting.run % 4}` }));
      drawing.append(mark(meeting.run, x(meeting.step), y(meeting.mean), meeting));
    }
    return element("figure", {}, drawing, element("figcaption", { class: "hint" },
      "Mean reward and range of each step; ",
      viewer.table.manifest.runs.map((run, number) =>
        `${["circle", "square", "triangle", "diamond"][number % 4]}: run ${number}, `
        + `${viewer.plainText(run.label)}`).join("; ")));
  }

  function mark(run, x, y, meeting) {
    const shapes = [
      () => svg("circle", { cx: x, cy: y, r: 4.5 }),
      () => svg("rect", { x: x - 4, y: y - 4, width: 8, height: 8 }),
      () => svg("path", { d: `M${x} ${y - 5}L${x + 5} ${y + 4}L${x - 5} ${y + 4}Z` }),
      () => svg("path", { d: `M${x} ${y - 6}L${x + 6} ${y}L${x} ${y + 6}L${x - 6} ${y}Z` }),
    ];
    const shape = shapes[run % 4]();
    shape.setAttribute("class", `mark run${run % 4}`);
    shape.append(svg("title", {}, `run ${run}, step ${meeting.step}: mean `
      + viewer.short(meeting.mean)));
    return shape;
  }
}
