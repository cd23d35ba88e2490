// Which columns the list shows: those that the address names, else the usual ones of the width.
"use strict";

{
  // Up to this width a row has room for the first few.
  const NARROW = 700;
  const FEW = ["step", "reward", "ending", "text"];
  // Texts have as much room as is left.
  const WIDE = ["text", "answer", "name"];
  const LETTER_PX = 8;
  // A step without the kind of its episode and its run beside it.
  const BARE_STEP_PX = 62;
  let isOpen = false;
  // Characters of an ending that are shown; the whole stands in its title.
  const MOST_OF_ENDING = 22;

  const number = (name) => (i) => shown(viewer.table[name][i]);

  // So that a number fits its column: 1230, 1.2e5.
  function shown(value) {
    if (Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (size && size < 1e-3) return value.toExponential(1).replaceAll("-", "−");
    if (!Number.isFinite(value) || size < 1000) return viewer.short(value, 3);
    if (size < 99999.5) return viewer.short(Math.round(value));
    return value.toExponential(1).replace("+", "").replace("-", "−");
  }

  // Columns: heading, sentence, pixels, text of row i; `extra`: shown where one asks for it.
  const COLUMNS = {
    step: ["Step", "training step", 104, (i) => viewer.table.step[i]],
    reward: ["Reward", "what is trained on", 74, number("reward")],
    ending: ["Ending", "how it ended", 0, null],
    text: ["Task", "how its first message begins", 180, null],
    advantage: ["Advantage", "mean over trained tokens", 82, number("advantage")],
    turns: ["Turns", "answers of the policy", 52, number("turns")],
    tokens: ["Tokens", "that the policy sampled", 62, number("tokens")],
    mismatch: ["Mismatch", "largest |engine − trainer| of a token, nats", 82, number("mismatch")],
    ratio: ["Ratio", "largest new/old probability of a token, or old/new", 58, number("ratio")],
    entropy: ["Entropy", "mean, nats", 68, number("entropy")],
    kl: ["KL", "mean log-prob less the reference's, nats", 84, number("kl")],
    gradient: ["Gradient", "share of the step's gradient", 78, number("gradient")],
    seconds: ["Seconds", "of the whole episode", 76, number("seconds"), true],
    env_seconds: ["Env. s", "seconds of its environment", 68, number("env_seconds"), true],
    engine_seconds: ["Engine s", "seconds of the engine for its turns", 76,
      number("engine_seconds"), true],
    attempts: ["Played", "times, failed attempts among them", 64, number("attempts"), true],
    rows: ["Rows", "sequences that it was trained as", 52, number("rows"), true],
    name: ["Task's name", "its name, its row or its seed", 120,
      (i) => viewer.visible(viewer.textOf("task_name", i)), true],
    source: ["Environment", "or the data source", 110,
      (i) => viewer.visible(viewer.textOf("source", i)), true],
    answer: ["Answer", "the end of what the policy said last", 180,
      (i) => viewer.visible((viewer.answers?.[i] ?? "…").replace(/\s+/g, " ")), true],
  };
  const TEXTS = ["ending", "text", "name", "source", "answer"];

  const isThere = (key) => ["step", ...TEXTS].includes(key) || viewer.table.has[key];

  // The keys of the columns that an address asks for.
  viewer.columnsOf = function (values) {
    const known = Object.keys(COLUMNS).filter(isThere);
    const asked = (values.columns || "").split(",");
    const chosen = known.filter((key) => asked.includes(key));
    if (chosen.length) return asked.filter((key, k) => chosen.includes(key) && asked.indexOf(key) === k);
    const few = window.innerWidth <= NARROW;
    return known.filter((key) => (few ? FEW.includes(key) : !COLUMNS[key][4]));
  };

  viewer.columnHead = (key) => ({ label: COLUMNS[key][0], sentence: COLUMNS[key][1],
    isSortable: !TEXTS.includes(key) });

  viewer.columnText = (key, i) => COLUMNS[key][3](i);

  // The widths of columns as a grid has them, and the least of a row.
  viewer.columnWidths = function (keys) {
    const widths = keys.map(widthOf);
    const grid = widths.map((width, k) =>
      (WIDE.includes(keys[k]) ? `minmax(${width}px, 1fr)` : `${width}px`));
    if (!keys.some((key) => WIDE.includes(key))) grid.push("1fr");
    return { grid: grid.join(" "), least: widths.reduce((sum, one) => sum + one, 18) };
  };

  function widthOf(key) {
    if (key === "ending") return longestEnding() * LETTER_PX + 22;
    const { hasKinds, manifest } = viewer.table;
    const isBare = key === "step" && !hasKinds && manifest.runs.length === 1;
    return isBare ? BARE_STEP_PX : COLUMNS[key][2];
  }

  // The characters that the endings need.
  function longestEnding() {
    const lengths = viewer.table.texts.ending.map((ending) => ending.length);
    return Math.min(MOST_OF_ENDING, Math.max("Ending".length, ...lengths));
  }

  // The box in which columns are chosen; `change` gets the address's `columns`.
  viewer.columnPicker = function (values, change) {
    const chosen = viewer.columnsOf(values);
    const boxes = Object.keys(COLUMNS).filter(isThere).map((key) => {
      const box = element("input", { type: "checkbox", checked: chosen.includes(key) });
      box.addEventListener("change", () => {
        const next = box.checked ? [...chosen, key] : chosen.filter((one) => one !== key);
        change({ columns: next.join(",") });
      });
      return element("label", { title: COLUMNS[key][1] }, box, ` ${COLUMNS[key][0]}`);
    });
    const usual = element("button", { type: "button", onclick: () => change({ columns: "" }) },
      "The usual ones");
    const details = element("details", { class: "columns-pick", open: isOpen },
      element("summary", {}, "Columns"), element("div", { class: "box" }, boxes, usual));
    // Each choice draws the list anew, and further ones may follow.
    details.addEventListener("toggle", () => {
      if (details.isConnected) isOpen = details.open;
    });
    return details;
  };
}
