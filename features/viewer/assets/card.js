// A token's card: what it is, what it was credited with, why it was trained on or not, and every
// number that was recorded of it.
"use strict";

{
  // Columns that have their own place on the card.
  const APART = ["fate", "prompt_ids", "response_ids", "turn_ids", "sampled"];
  const INTEGERS = ["weight_versions", "response_mask", "template_mask"];

  viewer.card = function (shown, { row: number, i }) {
    const { episode } = shown;
    const row = episode.rows[number];
    const { columns } = row;
    const [fate, sentence] = viewer.table.manifest.fates[columns.fate[i]] || ["unknown", ""];
    const turn = columns.turn_ids[i];
    const text = viewer.tokenText(episode, row, i, false);
    const close = element("button", { type: "button", class: "close", "aria-label": "Close" }, "✕");
    close.addEventListener("click", () => viewer.closeCard());
    return element("section", { class: "card", "aria-label": "Token" },
      element("header", {},
        element("h2", {}, element("span", { class: "token-text" }, shownText(text))), close),
      element("p", { class: `why t f-${fate}` }, fate.replaceAll("_", " ")),
      element("p", { class: "sentence" }, viewer.plainText(sentence)),
      element("dl", { class: "place" },
        pair("id", columns.response_ids[i], "id"),
        pair("row", number, "row"),
        pair("position", i, "position"),
        pair("turn", turn < 0 ? "none" : turn + 1, "turn")),
      credited(columns, i),
      table(columns, i));
  };

  function shownText(text) {
    return text === "" ? "(no text)" : text.split("\n").flatMap((part, k) =>
      (k ? [element("span", { class: "odd" }, "↵")] : []).concat(viewer.visible(part)));
  }

  function pair(name, value, key) {
    return [element("dt", {}, name), element("dd", { "data-key": key }, String(value))];
  }

  // In one sentence: the advantage, and what the loss made of it.
  function credited(columns, i) {
    if (!columns.advantages) return null;
    const advantage = viewer.short(columns.advantages[i]);
    const weight = columns.policy_weight;
    const parts = [`Credited with an advantage of ${advantage}`];
    if (weight) {
      const value = weight[i];
      const way = value > 0 ? "made likelier" : value < 0 ? "made less likely" : "not moved";
      parts.push(`; the last pass weighed it with ${viewer.short(value)}: ${way}`);
    }
    const ratio = viewer.measures.find((one) => one.name === "ratio").value(columns, i);
    if (columns.sampled[i] && !Number.isNaN(ratio)) {
      parts.push(`. In that pass it was ${viewer.short(Math.exp(ratio))} times as likely as when the `
        + "step began");
    }
    return element("p", { class: "sentence" }, `${parts.join("")}.`);
  }

  function table(columns, i) {
    const names = Object.keys(columns).filter((name) => !APART.includes(name));
    const derived = viewer.measures.filter((measure) =>
      ["ratio", "kl", "mismatch"].includes(measure.name));
    const rows = names.map((name) => {
      const value = columns[name][i];
      const isFloat32 = columns[name] instanceof Float32Array;
      const isInteger = INTEGERS.includes(name) || columns[name] instanceof Int8Array;
      const text = isInteger ? String(value) : viewer.exact(value, isFloat32);
      return line(name, text, value, viewer.table.manifest.columns[name] || "");
    });
    for (const measure of derived) {
      const value = measure.value(columns, i);
      if (Number.isNaN(value) || !columns.sampled[i]) continue;
      const told = measure.power ? Math.exp(value) : value;
      rows.push(line(measure.label, viewer.short(told), told, `Computed. ${measure.about}`));
    }
    return element("table", { class: "numbers" }, element("tbody", {}, rows));
  }

  function line(name, text, value, sentence) {
    return element("tr", {},
      element("th", { scope: "row" }, viewer.plainText(name),
        element("small", {}, viewer.plainText(sentence))),
      element("td", { "data-column": name, "data-value": String(value) }, text));
  }
}
