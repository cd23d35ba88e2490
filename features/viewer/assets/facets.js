// The column of distributions beside the list. Each counts the episodes that pass all other
// filters; a click adds its own filter or takes it back.
"use strict";

{
  const MOST_NAMES = 60;
  const MARKS = ["failed", "refilled", "empty", "spread", "stale", "cut", "masked"];

  viewer.facets = function (values, tests, found, change) {
    const all = viewer.select([], null);
    const others = (key) => viewer.select(tests, found, key);
    const parts = [
      kinds(all, others, values, change),
      viewer.histogram("Reward", viewer.table.reward, all, others("reward"),
        rangeOf(values.reward), (range) => change({ reward: range })),
      viewer.bySteps(`Reward${kindShown(values)}`, viewer.table.reward,
        ofOneKind(others("step"), values), values.step || null, (step) => change({ step })),
      textBars("Ending", "ending", "ending", all, others, values, change),
      marks(tests, found, all, others, values, change),
      solved(all, others, values, change),
      names(all, others, values, change),
      viewer.histogram("Tokens", viewer.table.tokens, all, others("tokens"),
        rangeOf(values.tokens), (range) => change({ tokens: range })),
      viewer.histogram("Seconds", viewer.table.seconds, all, others("seconds"),
        rangeOf(values.seconds), (range) => change({ seconds: range })),
      viewer.histogram("Turns", viewer.table.turns, all, others("turns"),
        rangeOf(values.turns), (range) => change({ turns: range })),
      fates(all, others, values, change),
      tools(all, others, values, change),
      textBars("Environment", "source", "source", all, others, values, change),
    ];
    return parts.filter(Boolean);
  };

  function rangeOf(value) {
    if (!value) return null;
    const [low, high] = value.split("..");
    return [low === "" ? -Infinity : Number(low), high ? Number(high) : Infinity];
  }

  // What change() is called with when an entry of a list is clicked.
  const toggled = (key, values, value) => ({ [key]: values[key] === value ? "" : value });

  function countBy(rows, entriesOf) {
    const counts = new Map();
    for (const i of rows) {
      for (const entry of entriesOf(i)) counts.set(entry, (counts.get(entry) || 0) + 1);
    }
    return counts;
  }

  function barsOf(title, key, entriesOf, all, others, values, change) {
    const counts = countBy(all, entriesOf);
    const selected = countBy(others(key), entriesOf);
    const entries = [...counts.entries()].sort((a, b) => b[1] - a[1]);
    if (!entries.length) return null;
    const rows = entries.map(([label, count]) => [
      label, count, selected.get(label) || 0, values[key] === label,
      () => change(toggled(key, values, label)),
    ]);
    return viewer.bars(title, rows);
  }

  // Where there are both: their numbers are not of one kind.
  function kinds(all, others, values, change) {
    if (!viewer.table.hasKinds) return null;
    const entryOf = (i) => [viewer.table.val[i] ? "val" : "train"];
    const [counts, selected] = [countBy(all, entryOf), countBy(others("kind"), entryOf)];
    const names = { train: "training", val: "validation" };
    return viewer.bars("Kind", Object.entries(names).map(([kind, label]) => [
      label, counts.get(kind), selected.get(kind) || 0, values.kind === kind,
      () => change(toggled("kind", values, kind)),
    ]));
  }

  // A step that also validates has rewards of both kinds, whose mean says nothing: by step those of
  // training are shown, of validation where that is chosen.
  function ofOneKind(rows, values) {
    if (!viewer.table.hasKinds) return rows;
    const wanted = values.kind === "val";
    return rows.filter((i) => Boolean(viewer.table.val[i]) === wanted);
  }

  function kindShown(values) {
    if (!viewer.table.hasKinds) return "";
    return values.kind === "val" ? " of validation" : " of training";
  }

  function textBars(title, key, column, all, others, values, change) {
    const texts = viewer.table.texts[column];
    if (texts.length < 2 && key === "source") return null;
    return barsOf(title, key, (i) => [texts[viewer.table[column][i]]], all, others, values, change);
  }

  // Episodes of tasks that were never, sometimes or always solved, where there are several tasks
  // that come again: of one that was played once this says no more than its reward.
  function solved(all, others, values, change) {
    const tasks = viewer.table.texts.task.length;
    if (tasks < 2 || (all.length < 2 * tasks && !values.solved)) return null;
    const { classOf } = viewer.tasks();
    const [counts, selected] = [countBy(all, (i) => [classOf(i)]),
      countBy(others("solved"), (i) => [classOf(i)])];
    return viewer.bars("Their task is", Object.entries(viewer.taskClasses)
      .filter(([kind]) => counts.has(kind)).map(([kind, label]) => [
        label, counts.get(kind), selected.get(kind) || 0, values.solved === kind,
        () => change(toggled("solved", values, kind)),
      ]));
  }

  // Tasks by their names; where each has few episodes, as with seeds, the list of tasks is of use.
  function names(all, others, values, change) {
    const count = viewer.table.texts.task_name.length;
    if (count < 2 || (count > MOST_NAMES && !values.name)) return null;
    return textBars("Task", "name", "task_name", all, others, values, change);
  }

  function tools(all, others, values, change) {
    const namesOf = (i) => viewer.textOf("tools", i).split("\n").filter(Boolean);
    return barsOf("Tools", "tool", namesOf, all, others, values, change);
  }

  function fates(all, others, values, change) {
    const names = viewer.table.manifest.fates.map((fate) => fate[0]);
    const namesOf = (i) => names.filter((_, k) => (viewer.table.fates[i] >>> Math.min(k, 31)) & 1);
    const counts = countBy(all, namesOf);
    const selected = countBy(others("fate"), namesOf);
    const rows = names.filter((name) => counts.has(name)).map((name) => [
      name.replaceAll("_", " "), counts.get(name), selected.get(name) || 0, values.fate === name,
      () => change(toggled("fate", values, name)),
    ]);
    return rows.length ? viewer.bars("Has tokens that are", rows, { most: 20 }) : null;
  }

  function marks(tests, found, all, others, values, change) {
    const rows = [];
    for (const key of MARKS) {
      const [label, test] = viewer.filters[key];
      const count = all.filter((i) => test(i)).length;
      if (!count) continue;
      const selected = others(key).filter((i) => test(i)).length;
      const click = () => change({ [key]: values[key] ? "" : "1" });
      rows.push([label, count, selected, values[key], click]);
    }
    return rows.length ? viewer.bars("Worth a look", rows) : null;
  }
}
