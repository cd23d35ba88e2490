// The tasks of a run, and how often each was solved. list_columns.py says how a task is named.
"use strict";

{
  const CLASSES = { never: "never solved", sometimes: "sometimes solved", always: "always solved" };
  viewer.taskClasses = CLASSES;

  // An episode is solved from this reward on: `pass` of the address, else 1 where an episode
  // reached it, else half way from the lowest reward to the highest.
  viewer.passAt = function (values) {
    const asked = Number(values?.pass);
    if (values?.pass && Number.isFinite(asked)) return asked;
    let [low, high] = [Infinity, -Infinity];
    for (const reward of viewer.table.reward) {
      if (reward < low) low = reward;
      if (reward > high) high = reward;
    }
    if (high >= 1 - 1e-9) return 1;
    return low < high ? (low + high) / 2 : 1;
  };

  viewer.isSolved = (i, passAt) => viewer.table.reward[i] >= passAt - 1e-9;

  viewer.classOfRate = (solved, all) =>
    (solved === 0 ? "never" : solved === all ? "always" : "sometimes");

  let made = null;

  // {classOf(i)}: how often the task of row i was solved, in all of its episodes.
  viewer.tasks = function () {
    const passAt = viewer.passAt(viewer.asked);
    if (made?.passAt === passAt) return made;
    const { table } = viewer;
    const all = new Uint32Array(table.texts.task.length);
    const solved = new Uint32Array(table.texts.task.length);
    for (const i of table.order) {
      all[table.task[i]] += 1;
      if (viewer.isSolved(i, passAt)) solved[table.task[i]] += 1;
    }
    const classOf = (i) => viewer.classOfRate(solved[table.task[i]], all[table.task[i]]);
    made = { passAt, classOf };
    return made;
  };

  // What is known of each task in these rows: counts, pass rates by step, seconds.
  viewer.tasksOf = function (rows, passAt) {
    const { table } = viewer;
    const found = new Map();
    for (const i of rows) {
      const code = table.task[i];
      if (!found.has(code)) found.set(code, { code, first: i, episodes: 0, solved: 0, reward: 0,
        seconds: 0, longest: -Infinity, slowest: i, tokens: 0, steps: new Map() });
      const task = found.get(code);
      const isSolved = viewer.isSolved(i, passAt);
      task.episodes += 1;
      task.solved += isSolved;
      task.reward += table.reward[i];
      task.tokens += table.tokens[i];
      task.seconds += table.seconds[i];
      if (table.seconds[i] > task.longest) [task.longest, task.slowest] = [table.seconds[i], i];
      const step = task.steps.get(table.step[i]) || [0, 0];
      step[0] += isSolved;
      step[1] += 1;
      task.steps.set(table.step[i], step);
    }
    return [...found.values()].map(summed);
  };

  function summed(task) {
    const steps = [...task.steps.entries()].sort((a, b) => a[0] - b[0])
      .map(([step, [solved, all]]) => [step, solved / all]);
    const mean = (sum) => sum / task.episodes;
    return { ...task, steps, pass: mean(task.solved), reward: mean(task.reward),
      tokens: mean(task.tokens), seconds: mean(task.seconds),
      longest: Number.isFinite(task.longest) ? task.longest : NaN,
      change: steps.length > 1 ? steps.at(-1)[1] - steps[0][1] : NaN,
      kind: viewer.classOfRate(task.solved, task.episodes) };
  }

  // What a task is called: its name, and how its first message begins.
  viewer.taskWords = function (i) {
    const name = viewer.textOf("task_name", i);
    const begins = viewer.textOf("beginning", i).replace(/\s+/g, " ");
    return [name ? element("strong", {}, viewer.visible(name)) : null, name && begins ? " " : null,
      viewer.visible(begins)];
  };
}
