// Looks for a text in all that was said: first in the index of short sequences (the same numbers
// as in training/run/viewer/search_index.py), then in the texts themselves.
"use strict";

{
  const NOTHING = 0x1fffff;
  const LONG_STEP = 255;
  // Of a long text so many sequences are looked up.
  const MOST_LOOKED_UP = 10;

  // Lowers the case of each character by itself, where that leaves it one character.
  viewer.fold = function (text) {
    return text.replace(/[A-Z\u0080-\uffff]/g, (character) => {
      const lower = character.toLowerCase();
      return lower.length === 1 ? lower : character;
    });
  };

  function numberOf(first, second, third) {
    let mixed = Math.imul(first, 0x9e3779b1) >>> 0;
    mixed = (mixed ^ (mixed >>> 15)) >>> 0;
    mixed = Math.imul((mixed + second) >>> 0, 0x85ebca77) >>> 0;
    mixed = (mixed ^ (mixed >>> 13)) >>> 0;
    mixed = Math.imul((mixed + third) >>> 0, 0xc2b2ae3d) >>> 0;
    return (mixed ^ (mixed >>> 16)) >>> 0;
  }

  function numbersOf(folded) {
    const at = (place) => folded.charCodeAt(place);
    if (folded.length === 1) return [numberOf(at(0), NOTHING, NOTHING)];
    if (folded.length === 2) return [numberOf(at(0), at(1), NOTHING)];
    const numbers = new Set();
    for (let i = 0; i + 2 < folded.length; i += 1) numbers.add(numberOf(at(i), at(i + 1), at(i + 2)));
    const all = [...numbers];
    const step = Math.max(1, Math.ceil(all.length / MOST_LOOKED_UP));
    return all.filter((_, i) => i % step === 0);
  }

  function episodesOf({ arrays }, number) {
    const { numbers, ends, steps } = arrays;
    let low = 0;
    let high = numbers.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (numbers[middle] < number) low = middle + 1;
      else high = middle;
    }
    const found = [];
    if (numbers[low] !== number) return found;
    let place = low ? ends[low - 1] : 0;
    let episode = -1;
    while (place < ends[low]) {
      let step = steps[place++];
      if (step === LONG_STEP) {
        step = steps[place] + steps[place + 1] * 256 + steps[place + 2] * 65536;
        step += steps[place + 3] * 16777216;
        place += 4;
      }
      episode += step;
      found.push(episode);
    }
    return found;
  }

  // Finds the episodes that hold all sequences of a text: {candidates (a byte an episode), …}.
  viewer.search = async function (text) {
    const folded = viewer.fold(text);
    const size = viewer.table.size;
    const found = { text, folded, candidates: new Uint8Array(size).fill(1), snippets: new Map() };
    found.looked = new Uint8Array(size);
    const numbers = folded ? numbersOf(folded) : [];
    const files = await Promise.all(
      numbers.map((number) => viewer.load(`search/${number >>> 24}`, { keep: false })),
    );
    numbers.forEach((number, k) => {
      const holds = new Uint8Array(size);
      for (const episode of episodesOf(files[k], number)) holds[episode] = 1;
      for (let i = 0; i < size; i += 1) found.candidates[i] &= holds[i];
    });
    return found;
  };

  // Looks into the texts of candidates, those of one file after the other; calls `progress` after
  // each file. Episodes that do not hold the text are candidates no longer.
  viewer.verify = async function (found, order, progress, isCurrent) {
    const table = viewer.table;
    const pages = new Map();
    for (const i of order) {
      if (!found.candidates[i] || found.looked[i]) continue;
      if (!pages.has(table.text_page[i])) pages.set(table.text_page[i], []);
      pages.get(table.text_page[i]).push(i);
    }
    for (const [page, episodes] of pages) {
      const { header } = await viewer.load(viewer.numbered("texts", page), { keep: false });
      if (!isCurrent()) return;
      for (const i of episodes) look(found, i, header.texts[i - header.first]);
      progress();
    }
  };

  function look(found, i, texts) {
    found.looked[i] = 1;
    for (const text of texts) {
      const place = viewer.fold(text).indexOf(found.folded);
      if (place >= 0) {
        found.snippets.set(i, snippetOf(text, place, found.text.length));
        return;
      }
    }
    found.candidates[i] = 0;
  }

  // [before, found, after], of one line.
  function snippetOf(text, place, length) {
    const line = (part) => part.replace(/\s+/g, " ");
    return [
      (place > 30 ? "…" : "") + line(text.slice(Math.max(0, place - 30), place)),
      line(text.slice(place, place + length)),
      line(text.slice(place + length, place + length + 120)),
    ];
  }
}
