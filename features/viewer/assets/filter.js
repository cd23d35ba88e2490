// Which episodes an address asks for, and in which order.
"use strict";

{
  // What an address may ask for, in the words of the page: key -> [label, test of row and value].
  const table = () => viewer.table;
  const range = (name) => (i, [low, high]) => table()[name][i] >= low && table()[name][i] <= high;
  const text = (name) => (i, wanted) => viewer.textOf(name, i) === wanted;

  viewer.filters = {
    run: ["run", (i, wanted) => table().run[i] === wanted, Number],
    kind: ["kind", (i, wanted) => (table().val[i] ? "val" : "train") === wanted],
    step: ["step", range("step"), parseRange],
    group: ["group", text("uid")],
    source: ["environment", text("source")],
    task: ["task", text("task")],
    name: ["task", text("task_name")],
    solved: ["task", (i, wanted) => viewer.tasks().classOf(i) === wanted],
    ending: ["ending", text("ending")],
    tool: ["tool", (i, wanted) => viewer.textOf("tools", i).split("\n").includes(wanted)],
    fate: ["tokens that are", (i, wanted) => (table().fates[i] >>> wanted) & 1, fateNumber],
    reward: ["reward", range("reward"), parseRange],
    tokens: ["tokens", range("tokens"), parseRange],
    turns: ["turns", range("turns"), parseRange],
    rows: ["rows", range("rows"), parseRange],
    seconds: ["seconds", range("seconds"), parseRange],
    refilled: ["played again", (i) => table().attempts[i] > 1],
    spread: ["group without spread", (i) => table().no_spread[i] === 1],
    empty: ["empty answers", (i) => table().empty[i] === 1],
    stale: ["older weights", (i) => table().stale[i] === 1],
    failed: ["failed", (i) => table().failed[i] === 1],
    cut: ["a turn was cut", (i) => table().cut[i] === 1],
    masked: ["not trained on", (i) => table().masked[i] === 1],
  };

  function fateNumber(name) {
    const place = table().manifest.fates.findIndex((fate) => fate[0] === name);
    return place < 0 ? 31 : Math.min(place, 31);
  }

  // "0.5..1": both ends are in it.
  function parseRange(value) {
    const [low, high] = value.split("..");
    return [low === "" ? -Infinity : Number(low), high === "" ? Infinity : Number(high ?? low)];
  }

  // Numbers that a list is sorted by; the largest distance from 1 is called ratio.
  viewer.sortKeys = [
    "step", "reward", "tokens", "turns", "mismatch", "ratio", "entropy", "kl", "advantage",
    "gradient", "seconds", "env_seconds", "engine_seconds", "attempts", "rows",
  ];

  // Prepares the tests of an address's values: [key, row -> truth].
  viewer.testsOf = function (values) {
    viewer.asked = values;
    const tests = [];
    for (const [key, value] of Object.entries(values)) {
      if (!Object.hasOwn(viewer.filters, key) || value === "") continue;
      const [, test, parse] = viewer.filters[key];
      const wanted = parse ? parse(value) : value;
      tests.push([key, (i) => test(i, wanted)]);
    }
    return tests;
  };

  // Lists the rows that pass all tests, but that of the key `except`.
  viewer.select = function (tests, found, except) {
    const rows = [];
    const asked = tests.filter(([key]) => key !== except);
    for (const i of table().order) {
      if (found && !found.candidates[i]) continue;
      if (asked.every(([, test]) => test(i))) rows.push(i);
    }
    return rows;
  };

  // Sorts rows by a key, `-` in front of it for descending; what was not recorded comes last.
  viewer.sortRows = function (rows, sort) {
    if (!sort) return rows;
    const descending = sort.startsWith("-");
    const column = table()[descending ? sort.slice(1) : sort];
    if (!viewer.sortKeys.includes(sort.replace(/^-/, "")) || !column) return rows;
    const direction = descending ? -1 : 1;
    return rows.sort((a, b) => {
      const [x, y] = [column[a], column[b]];
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a - b;
      return direction * (x - y) || a - b;
    });
  };
}
