// Where a turn thinks: the ranges of its text between the markers of the families' forms.
"use strict";

{
  const FORMS = [
    ["<think>", "</think>"],
    ["[THINK]", "[/THINK]"],
    ["<seed:think>", "</seed:think>"],
    ["<|channel>", "<channel|>"],
    ["<|channel|>analysis<|message|>", "<|end|>"],
  ];

  // A text's parts in order, {start, end, thinks}; markers belong to the thinking. Where the prompt
  // opened it, all up to the first closing marker is thinking; what is not closed goes to the end.
  viewer.thinkingIn = function (text) {
    const parts = [];
    const add = (start, end, thinks) => {
      if (end > start) parts.push({ start, end, thinks });
    };
    let place = openedBefore(text);
    add(0, place, true);
    while (place < text.length) {
      const next = firstOf(text, place);
      const begin = next ? next.at : text.length;
      add(place, begin, false);
      if (!next) break;
      const close = text.indexOf(next.form[1], begin + next.form[0].length);
      place = close < 0 ? text.length : close + next.form[1].length;
      add(begin, place, true);
    }
    return parts;
  };

  // The end of thinking whose opening marker stands in the prompt; 0: there is none.
  function openedBefore(text) {
    for (const [opens, closes] of FORMS.slice(0, 4)) {
      const end = text.indexOf(closes);
      const begin = text.indexOf(opens);
      if (end >= 0 && (begin < 0 || begin > end)) return end + closes.length;
    }
    return 0;
  }

  function firstOf(text, from) {
    const found = FORMS.map((form) => ({ form, at: text.indexOf(form[0], from) }))
      .filter(({ at }) => at >= 0);
    return found.sort((one, other) => one.at - other.at)[0] || null;
  }
}
