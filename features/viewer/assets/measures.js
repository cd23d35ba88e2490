// What tokens are coloured by: how each measure is read from a row's columns, and its scale.
"use strict";

{
  const column = (name) => (columns, i) => (columns[name] ? columns[name][i] : NaN);
  const engine = (columns) => columns.rollout_log_probs || columns.log_probs;
  const trainer = (columns) => columns.old_log_probs || columns.log_prob;
  const difference = (first, second) => (columns, i) => {
    const [a, b] = [first(columns), second(columns)];
    return a && b ? a[i] - b[i] : NaN;
  };
  const named = (name) => (columns) => columns[name];

  // kind: sequential (from 0 on), diverging (around 0), category. A measure that is told as
  // exp(value) says so with `power`. Tokens outside `where` have none.
  viewer.measures = [
    { name: "fate", label: "Fate: trained on or not", kind: "category", value: column("fate"),
      all: true },
    { name: "logprob", label: "Log-prob", unit: "nats", kind: "sequential",
      value: (columns, i) => -(trainer(columns) || engine(columns))[i], negative: true,
      about: "The trainer's before the update, else the engine's." },
    { name: "entropy", label: "Entropy", unit: "nats", kind: "sequential",
      value: column("entropy"), about: "The policy's, in the last pass of the update." },
    { name: "advantage", label: "Advantage", kind: "diverging", value: column("advantages"),
      about: "As the loss saw it." },
    { name: "weight", label: "Policy weight", kind: "diverging", value: column("policy_weight"),
      about: "Minus the derivative of the loss by the token's log-prob: above 0 it was made "
        + "likelier." },
    { name: "ratio", label: "Probability ratio", kind: "diverging", power: true,
      value: difference(named("log_prob"), named("old_log_probs")),
      about: "New by old probability, in the last pass of the update." },
    { name: "kl", label: "KL to the reference", unit: "nats", kind: "diverging",
      value: difference(named("old_log_probs"), named("ref_log_prob")),
      about: "Log-prob before the update less the reference's." },
    { name: "mismatch", label: "Engine against trainer", unit: "nats", kind: "diverging",
      value: difference(engine, trainer), about: "Engine's log-prob less the trainer's." },
    { name: "version", label: "Weight version", kind: "category", value: column("weight_versions") },
    { name: "reward", label: "Reward", kind: "diverging",
      value: (columns, i) => (columns.token_level_rewards || columns.rewards)[i],
      about: "At the token, less any KL term." },
    { name: "value", label: "Value", kind: "diverging", value: column("values"),
      about: "The critic's, before the token." },
  ];

  const LEVELS = 8;
  // Colours reach the end of their scale here; the few beyond get its last one.
  const QUANTILE = 0.98;

  // Whether a row's column says something about token i: of most measures on sampled tokens alone.
  viewer.valueOf = function (measure, row, i) {
    if (!measure.all && !row.columns.sampled[i]) return NaN;
    return measure.value(row.columns, i);
  };

  // The measures that these rows have numbers for.
  viewer.measuresOf = function (rows) {
    return viewer.measures.filter((measure) =>
      rows.some((row) => {
        const length = row.columns.response_ids.length;
        for (let i = 0; i < length; i += 1) {
          if (hasValue(measure, row, i)) return true;
        }
        return false;
      }));
  };

  function hasValue(measure, row, i) {
    try {
      return !Number.isNaN(viewer.valueOf(measure, row, i));
    } catch {
      return false;
    }
  }

  // The scale of a measure over rows: {end} or {entries: [[value, label, class, count]]}.
  viewer.scaleOf = function (measure, rows) {
    const values = [];
    for (const row of rows) {
      for (let i = 0; i < row.columns.response_ids.length; i += 1) {
        const value = viewer.valueOf(measure, row, i);
        if (!Number.isNaN(value)) values.push(value);
      }
    }
    return measure.kind === "category" ? categories(measure, values) : ends(values);
  };

  function ends(values) {
    const sizes = values.map(Math.abs).filter(Number.isFinite).sort((a, b) => a - b);
    const largest = sizes.at(-1) || 0;
    const end = sizes[Math.min(sizes.length - 1, Math.floor(sizes.length * QUANTILE))] || largest;
    return { end: end || 1, largest };
  }

  function categories(measure, values) {
    const counts = new Map();
    for (const value of values) counts.set(value, (counts.get(value) || 0) + 1);
    const fates = viewer.table.manifest.fates;
    const entries = [...counts.entries()].sort((a, b) => a[0] - b[0]).map(([value, count], k) => {
      const isFate = measure.name === "fate";
      const name = isFate ? fates[value]?.[0] || `fate ${value}` : `step ${value}`;
      return [value, name.replaceAll("_", " "), isFate ? fateClass(name) : `k${k % 8}`, count];
    });
    return { entries, classes: new Map(entries.map(([value, , name]) => [value, name])) };
  }

  const FATES = ["trained", "environment", "template", "rejected", "clipped", "over_limit",
    "no_spread", "zero_advantage", "masked_failure", "stale", "filtered", "not_drawn", "warmup",
    "skipped", "observed", "surplus", "masked", "copied", "untrained",
    "validation", "unrecorded", "dropped"];
  const fateClass = (name) => (FATES.includes(name) ? `f-${name}` : "f-other");

  // The class that gives a token its colour.
  viewer.levelOf = function (measure, scale, value) {
    if (Number.isNaN(value)) return "none";
    if (measure.kind === "category") return scale.classes.get(value) || "none";
    const share = Math.min(1, Math.abs(value) / scale.end);
    const level = Math.ceil(share * LEVELS - 1e-9);
    if (measure.kind === "sequential") return `s${level}`;
    return value < 0 ? `n${level}` : `p${level}`;
  };

  // The number as it is told.
  viewer.told = function (measure, value) {
    if (Number.isNaN(value)) return "–";
    if (measure.name === "fate") return viewer.table.manifest.fates[value]?.[0] || String(value);
    if (measure.power) return viewer.short(Math.exp(value));
    return viewer.short(measure.negative ? -value : value);
  };

  // The legend: what the colours mean, with the numbers at their ends.
  viewer.legend = function (measure, scale, pick) {
    if (measure.kind === "category") return categoryLegend(scale, pick);
    const levels = [];
    const isDiverging = measure.kind === "diverging";
    if (isDiverging) for (let k = LEVELS; k >= 1; k -= 1) levels.push(`n${k}`);
    for (let k = 0; k <= LEVELS; k += 1) levels.push(isDiverging ? `p${k}` : `s${k}`);
    const steps = levels.map((name) => element("span", { class: `step ${name}` }));
    const beyond = scale.largest > scale.end;
    const least = isDiverging ? `${beyond ? "≤ " : ""}${viewer.told(measure, -scale.end)}`
      : viewer.told(measure, 0);
    const most = `${beyond ? (measure.negative ? "≤ " : "≥ ") : ""}${viewer.told(measure, scale.end)}`;
    const middle = isDiverging ? element("span", {}, viewer.told(measure, 0)) : null;
    return element("div", { class: "legend" },
      element("div", { class: "ramp", "aria-hidden": "true" }, steps),
      element("div", { class: "ends" },
        element("span", {}, least), middle, element("span", {}, most)),
      element("p", { class: "hint" },
        [measure.about, measure.unit ? `In ${measure.unit}.` : "", "Hatched: none was recorded or "
          + "nobody sampled the token."].filter(Boolean).join(" ")));
  };

  function categoryLegend(scale, pick) {
    const rows = scale.entries.map(([value, label, name, count]) =>
      element("li", {}, element("button",
        { type: "button", class: "key", onclick: () => pick(value),
          title: `go to the next token: ${viewer.plainText(label)}` },
        element("span", { class: `t ${name}` }, "ab"),
        element("span", {}, viewer.plainText(label)),
        element("span", { class: "number" }, thousands(count)))));
    return element("ul", { class: "legend keys" }, rows);
  }
}
