// All tasks: how often each was solved over the steps, which never or always, which are slow.
"use strict";

{
  // So many rows are drawn, and so many more each time that one asks for them.
  const ROWS = 60;
  const SVG = "http://www.w3.org/2000/svg";
  const [WIDTH, HEIGHT] = [120, 22];
  // Columns: key, heading, sentence, text of a task.
  const percent = (share) => viewer.percent(share, 1);
  const COLUMNS = [
    ["pass", "Solved", "share of its episodes", (task) => percent(task.pass)],
    ["change", "Change", "of the pass rate, from its first step to its last",
      (task) => (Number.isNaN(task.change) ? "–" : signed(task.change))],
    ["episodes", "Episodes", "of the task", (task) => thousands(task.episodes)],
    ["reward", "Reward", "mean", (task) => viewer.short(task.reward, 3)],
    ["tokens", "Tokens", "mean of an episode", (task) => thousands(Math.round(task.tokens))],
    ["seconds", "Seconds", "mean of an episode", (task) => seconds(task.seconds)],
    ["longest", "Longest", "seconds of its slowest episode", (task) => slowest(task)],
  ];

  const seconds = (value) => (Number.isNaN(value) ? "–" : viewer.short(value, 2));
  const signed = (share) => `${share > 0 ? "+" : ""}${Math.round(100 * share)} %`.replace("-", "−");

  function slowest(task) {
    if (Number.isNaN(task.longest)) return "–";
    return element("a", { href: viewer.episodeAddress(task.slowest) }, seconds(task.longest));
  }

  viewer.views.tasks = async function (main, { values }) {
    document.title = "Tasks";
    viewer.asked = values;
    const passAt = viewer.passAt(values);
    const { solved, ...others } = values;
    const rows = viewer.select(viewer.testsOf(others), null);
    const tasks = viewer.tasksOf(rows, passAt);
    const shown = sorted(solved ? tasks.filter((task) => task.kind === solved) : tasks, values.sort);
    const change = (changes) => {
      location.hash = viewer.address(["tasks"], { ...values, ...changes });
    };
    viewer.replace(main, element("article", { class: "tasks" },
      element("nav", { "aria-label": "Place" },
        element("a", { href: viewer.listAddress(viewer.listed.values) }, "List"), " › tasks"),
      element("h1", {}, plural(tasks.length, "task"), element("span", { class: "hint" },
        ` in ${plural(rows.length, "episode")}`)),
      element("p", { class: "hint" }, "A task is what its environment calls it (info[\"task\"]), or "
        + "the dataset's row, or the environment's seed."),
      bar(tasks, values, passAt, change),
      shown.length ? tableOf(shown, values, change)
        : element("p", { class: "nothing" }, "No task is so.")));
  };

  function bar(tasks, values, passAt, change) {
    const counts = { never: 0, sometimes: 0, always: 0 };
    for (const task of tasks) counts[task.kind] += 1;
    const kinds = Object.entries(viewer.taskClasses).map(([kind, label]) =>
      element("button", { type: "button", class: "chip", disabled: !counts[kind],
        "aria-pressed": String(values.solved === kind),
        onclick: () => change({ solved: values.solved === kind ? "" : kind }) },
        `${label} ${thousands(counts[kind])}`));
    const pass = element("input", { type: "number", step: "any", value: String(passAt),
      "aria-label": "reward from which on an episode counts as solved" });
    pass.addEventListener("change", () => change({ pass: pass.value }));
    const slow = element("button", { type: "button", class: "chip",
      "aria-pressed": String(values.sort === "-longest"),
      onclick: () => change({ sort: values.sort === "-longest" ? "" : "-longest" }) },
      "slowest first");
    const others = Object.keys(values).filter((key) => values[key]
      && Object.hasOwn(viewer.filters, key) && !["solved", "kind"].includes(key));
    return element("div", { class: "tasks-bar" }, kinds, slow, kindPicker(values, change),
      element("label", {}, "solved from a reward of ", pass),
      others.map((key) => element("button", { type: "button", class: "chip",
        onclick: () => change({ [key]: "" }) },
        viewer.plainText(`${viewer.filters[key][0]} ${values[key]}`),
        element("span", { "aria-hidden": "true" }, " ✕"))));
  }

  function kindPicker(values, change) {
    if (!viewer.table.hasKinds) return null;
    const select = element("select", { "aria-label": "episodes of" },
      [["", "training and validation"], ["train", "training"], ["val", "validation"]]
        .map(([value, label]) => element("option", { value }, label)));
    select.value = values.kind || "";
    select.addEventListener("change", () => change({ kind: select.value }));
    return select;
  }

  // Without an order the tasks that are solved least stand first, of those the most played.
  function sorted(tasks, sort) {
    const key = (sort || "pass").replace(/^-/, "");
    const known = COLUMNS.some(([name]) => name === key) ? key : "pass";
    const direction = (sort || "").startsWith("-") ? -1 : 1;
    return tasks.sort((a, b) => {
      const [x, y] = [a[known], b[known]];
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      return direction * (x - y) || b.episodes - a.episodes || a.code - b.code;
    });
  }

  function tableOf(tasks, values, change) {
    const sort = values.sort || "pass";
    const heads = COLUMNS.map(([key, label, sentence]) => {
      const isSorted = sort.replace(/^-/, "") === key;
      const descends = sort.startsWith("-");
      const next = isSorted && descends ? key : `-${key}`;
      const order = isSorted ? (descends ? "descending" : "ascending") : "none";
      return element("th", { scope: "col", "aria-sort": order },
        element("button", { type: "button", title: sentence, onclick: () => change({ sort: next }) },
          label + (isSorted ? (descends ? " ↓" : " ↑") : "")));
    });
    heads.splice(1, 0, element("th", { scope: "col" }, "Solved by step"));
    const body = element("tbody", {});
    const more = element("button", { type: "button" });
    const add = () => {
      const start = body.childElementCount;
      for (const task of tasks.slice(start, start + ROWS)) body.append(rowOf(task, values));
      const rest = tasks.length - body.childElementCount;
      more.hidden = rest <= 0;
      more.textContent = `${thousands(Math.min(ROWS, rest))} more of ${thousands(rest)}`;
    };
    more.addEventListener("click", add);
    add();
    return element("div", {}, element("div", { class: "scroll" },
      element("table", { class: "task-table" },
        element("thead", {}, element("tr", {},
          element("th", { scope: "col" }, "Task"), heads)), body)), more);
  }

  function rowOf(task, values) {
    const key = viewer.textOf("task", task.first);
    const cells = COLUMNS.map(([, , , text]) => element("td", {}, text(task)));
    cells.splice(1, 0, element("td", {}, spark(task.steps)));
    const list = viewer.listAddress({ task: key, kind: values.kind, sort: "-step" });
    return element("tr", { class: `of-${task.kind}` },
      element("th", { scope: "row" },
        element("a", { href: viewer.taskAddress(task.first) }, viewer.taskWords(task.first)), " ",
        element("a", { class: "hint", href: list }, "list")), cells);
  }

  // The pass rate over steps, from 0 at the bottom to 1 at the top.
  function spark(steps) {
    const [first, last] = [steps[0][0], steps.at(-1)[0]];
    const x = (step) => 3 + ((step - first) / (last - first || 1)) * (WIDTH - 6);
    const y = (rate) => HEIGHT - 3 - rate * (HEIGHT - 6);
    const label = `solved ${percent(steps[0][1])} at step ${first}, `
      + `${percent(steps.at(-1)[1])} at step ${last}`;
    const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", class: "spark",
      "aria-label": label, width: WIDTH, height: HEIGHT });
    drawing.append(svg("line", { x1: 0, x2: WIDTH, y1: y(0), y2: y(0), class: "axis" }));
    if (steps.length > 1) {
      drawing.append(svg("polyline",
        { points: steps.map(([step, rate]) => `${x(step)},${y(rate)}`).join(" ") }));
    }
    drawing.append(svg("circle", { cx: x(last), cy: y(steps.at(-1)[1]), r: 2.5 }));
    const title = svg("title", {});
    title.textContent = label;
    drawing.append(title);
    return drawing;
  }

  function svg(tag, attributes) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  }
}
