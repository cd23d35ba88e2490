// Draws tokens: a span each, whose class gives its colour and whose data say which token it is.
"use strict";

{
  // So many tokens are drawn at first, and again each time one asks for more.
  const MOST_AT_ONCE = 6000;

  // The text of token i of a row's response, or of its prompt.
  viewer.tokenText = function (episode, row, i, inPrompt) {
    const texts = inPrompt ? row.prompt_texts : row.texts;
    if (i in texts) return texts[i];
    const id = (inPrompt ? row.columns.prompt_ids : row.columns.response_ids)[i];
    return episode.vocabulary.get(id) ?? `#${id} `;
  };

  // Draws some tokens of a row's response: those at `places`.
  viewer.tokenSpans = function (shown, number, places) {
    const block = element("span", { class: "tokens" });
    drawFrom(block, shown, number, places, 0);
    return block;
  };

  function drawFrom(block, shown, number, places, start) {
    const wanted = shown.token && shown.token.row === number ? places.indexOf(shown.token.i) : -1;
    const end = Math.min(places.length, Math.max(start + MOST_AT_ONCE, wanted + 200));
    for (let k = start; k < end; k += 1) block.append(tokenSpan(shown, number, places[k]));
    if (end === places.length) return;
    const rest = `… ${plural(places.length - end, "more token")}`;
    const more = element("button", { type: "button", class: "more" }, rest);
    more.addEventListener("click", () => {
      more.remove();
      drawFrom(block, shown, number, places, end);
    });
    block.append(more);
  }

  function tokenSpan(shown, number, i) {
    const row = shown.episode.rows[number];
    const text = viewer.tokenText(shown.episode, row, i, false);
    const span = element("span", { "data-row": number, "data-i": i, tabindex: "-1" },
      tokenNodes(text));
    paint(shown, span);
    return span;
  }

  // A newline is a sign and a newline; a token without a text a sign.
  function tokenNodes(text) {
    if (text === "") return [element("span", { class: "odd" }, "·")];
    const nodes = [];
    text.split("\n").forEach((part, k) => {
      if (k) nodes.push(element("span", { class: "odd newline" }, "↵"), "\n");
      nodes.push(...viewer.visible(part));
    });
    return nodes;
  }

  // Gives a token the class and the number of the measure that is shown.
  function paint(shown, span) {
    const [number, i] = [Number(span.dataset.row), Number(span.dataset.i)];
    const { measure, scale } = shown;
    let name = "t";
    if (measure) {
      const value = viewer.valueOf(measure, shown.episode.rows[number], i);
      name += ` ${viewer.levelOf(measure, scale, value)}`;
      if (shown.numbers) span.dataset.number = viewer.told(measure, value).replaceAll("_", " ");
      else delete span.dataset.number;
    } else {
      delete span.dataset.number;
    }
    const isOpen = shown.token && shown.token.row === number && shown.token.i === i;
    span.className = isOpen ? `${name} open` : name;
    span.tabIndex = isOpen ? 0 : -1;
  }

  viewer.repaint = function (shown, root) {
    for (const span of root.querySelectorAll("span[data-i]")) paint(shown, span);
  };

  // The tokens of a prompt, which have no columns.
  viewer.promptSpans = function (episode, row) {
    const block = element("span", { class: "tokens prompt" });
    const length = row.columns.prompt_ids.length;
    const first = Math.max(0, length - 20000);
    if (first) block.append(element("span", { class: "hint" }, `${first} tokens before … `));
    for (let i = first; i < length; i += 1) {
      block.append(element("span", { class: "t" },
        tokenNodes(viewer.tokenText(episode, row, i, true))));
    }
    return block;
  };
}
