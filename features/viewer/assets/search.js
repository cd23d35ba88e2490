// Looks for a text in all that was said. Texts that are in memory (texts.js) are looked through at
// once. Where some are not yet, or are too many, the index of short sequences (the same numbers as
// in features/viewer/search_index.py) says which of the others are to be loaded.
"use strict";

{
  // How long the indexed sequences are.
  const LENGTHS = [5, 4, 3, 2, 1];
  const MIX = 0x9e3779b1;
  const CHECK_MIX = 0x85ebca6b;
  const LONG_STEP = 255;
  // Of a long text so many sequences are looked up.
  const MOST_LOOKED_UP = 12;
  const READ_AHEAD = 6;
  // Stands behind each text of a file (features/viewer/episode_pages.py).
  const BETWEEN_TEXTS = "\0";
  // So long a look into texts may keep the page from answering.
  const SLICE_MS = 40;

  function numberOf(folded, start, length, mix) {
    let mixed = length;
    for (let place = start; place < start + length; place += 1) {
      mixed = Math.imul(mixed ^ folded.charCodeAt(place), mix) >>> 0;
      mixed = (mixed ^ (mixed >>> 15)) >>> 0;
    }
    return mixed;
  }

  // The numbers of a text's longest indexed sequences: all of a short text, some of a long one.
  function numbersOf(folded) {
    const length = LENGTHS.find((one) => one <= folded.length);
    const numbers = new Set();
    for (let i = 0; i + length <= folded.length; i += 1) numbers.add(numberOf(folded, i, length, MIX));
    const all = [...numbers];
    const step = Math.max(1, Math.ceil(all.length / MOST_LOOKED_UP));
    return all.filter((_, i) => i % step === 0);
  }

  // The place of a number among those that rise; -1 where it is none of them.
  function placeOf(numbers, number) {
    let low = 0;
    let high = numbers.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (numbers[middle] < number) low = middle + 1;
      else high = middle;
    }
    return numbers[low] === number ? low : -1;
  }

  // Marks in `holds` the episodes of a part whose texts have a sequence.
  function markEpisodes(file, number, first, holds) {
    const { ends, steps, long_places: longPlaces, long_steps: longSteps } = file.arrays;
    const low = placeOf(file.arrays.numbers, number);
    if (low < 0) return;
    let episode = first - 1;
    for (let place = low ? ends[low - 1] : 0; place < ends[low]; place += 1) {
      const isLong = steps[place] === LONG_STEP;
      episode += isLong ? longSteps[placeOf(longPlaces, place)] : steps[place];
      holds[episode] = 1;
    }
  }

  // Finds the episodes that may hold a text: {candidates (a byte an episode), isExact, …}. `isExact`
  // says that they do; others are to be looked into (`verify`).
  viewer.search = async function (text) {
    const { size } = viewer.table;
    // A blank stands for the mark in the texts, too.
    const folded = viewer.fold(text).replaceAll(BETWEEN_TEXTS, " ");
    const found = { text, folded, candidates: new Uint8Array(size).fill(1), snippets: new Map() };
    found.looked = new Uint8Array(size);
    await lookIntoKept(found);
    found.isExact = found.looked.every((one) => one === 1);
    if (!found.isExact) await lookUp(found);
    return found;
  };

  // Looks into all texts that are in memory.
  async function lookIntoKept(found) {
    const pause = pauses();
    const count = viewer.countTexts();
    for (let number = 0; number < count; number += 1) {
      const file = viewer.keptTexts(number);
      if (file) lookInto(found, file);
      await pause();
    }
  }

  // Returns what lets the page answer, wherever it is awaited, once it has not for SLICE_MS.
  function pauses() {
    let began = performance.now();
    return async () => {
      if (performance.now() - began < SLICE_MS) return;
      await new Promise((resolve) => setTimeout(resolve));
      began = performance.now();
    };
  }

  // Leaves those candidates that hold all sequences of the text.
  async function lookUp(found) {
    const { folded } = found;
    const { size, manifest } = viewer.table;
    const numbers = folded ? numbersOf(folded) : [];
    const files = await Promise.all(
      manifest.parts.map((part) => Promise.all(numbers.map((number) => indexFile(part, number)))),
    );
    numbers.forEach((number, k) => {
      const holds = new Uint8Array(size);
      manifest.parts.forEach(({ first }, p) => markEpisodes(files[p][k], number, first, holds));
      for (let i = 0; i < size; i += 1) found.candidates[i] &= holds[i];
    });
    found.isExact = LENGTHS.includes(folded.length)
      && manifest.parts.every((part, p) => isKnown(folded, numbers[0], files[p][0], part, found));
  }

  // The file of a part's index in which a sequence is: the highest bits of its number tell.
  function indexFile({ number, files }, sequence) {
    const file = Math.floor((sequence * files) / 2 ** 32);
    return viewer.load(`search/${number}/${file}`, { keep: false });
  }

  // Whether a part's index alone tells which episodes hold a text that is one of its sequences.
  function isKnown(folded, number, file, part, found) {
    const place = placeOf(file.arrays.numbers, number);
    if (place < 0) return true;
    const check = file.arrays.checks[place];
    // Two sequences share the number.
    if (check === 0) return false;
    const own = (numberOf(folded, 0, folded.length, CHECK_MIX) | 1) >>> 0;
    if (check !== own) found.candidates.fill(0, part.first, part.first + part.episodes);
    return true;
  }

  // Looks into the texts of candidates, those of one file after the other; calls `progress` after
  // each file. Episodes that do not hold the text are candidates no longer. Where a row `isShown`,
  // it says where it holds the text, too.
  viewer.verify = async function (found, order, { isShown, progress, isCurrent }) {
    const table = viewer.table;
    const pages = new Map();
    for (const i of order) {
      if (!found.candidates[i]) continue;
      if (found.looked[i] && (!isShown || found.snippets.has(i))) continue;
      if (!pages.has(table.text_page[i])) pages.set(table.text_page[i], []);
      pages.get(table.text_page[i]).push(i);
    }
    // Where a row holds the text is shown as it was said.
    const texts = isShown ? viewer.loadTexts : viewer.foldedTexts;
    const pause = pauses();
    const numbers = [...pages.keys()];
    // The next files are read while one is looked into.
    const coming = numbers.slice(0, READ_AHEAD).map(texts);
    for (let k = 0; k < numbers.length; k += 1) {
      const file = await coming.shift();
      if (!isCurrent()) return;
      if (k + READ_AHEAD < numbers.length) coming.push(texts(numbers[k + READ_AHEAD]));
      if (isShown) showPlaces(found, file, pages.get(numbers[k]));
      else lookInto(found, file);
      progress();
      await pause();
    }
  };

  // Looks into all texts of a file at once; returns where each episode that holds the text does.
  function lookInto(found, { first, ends, folded }) {
    const places = new Map();
    let place = folded.indexOf(found.folded);
    let k = 0;
    while (place >= 0) {
      while (ends[k] <= place) k += 1;
      places.set(first + k, place);
      // One place of an episode is enough.
      place = folded.indexOf(found.folded, ends[k]);
    }
    for (let i = first; i < first + ends.length; i += 1) {
      found.looked[i] = 1;
      if (!places.has(i)) found.candidates[i] = 0;
    }
    return places;
  }

  // Looks into all texts of a file, and says of some rows where they hold the text.
  function showPlaces(found, { first, ends, whole }, rows) {
    const places = lookInto(found, { first, ends, folded: viewer.fold(whole) });
    for (const i of rows) {
      const at = places.get(i);
      if (at !== undefined) found.snippets.set(i, snippetOf(whole, at, found.text.length));
    }
  }

  // [before, found, after], of one line.
  function snippetOf(whole, at, length) {
    const line = (part) => part.replace(/\s+/g, " ");
    // The text itself, without its neighbours in the file.
    const begins = whole.lastIndexOf(BETWEEN_TEXTS, at) + 1;
    const ends = whole.indexOf(BETWEEN_TEXTS, at);
    const near = whole.slice(Math.max(begins, at - 200), Math.min(ends, at + length + 200));
    // A copy: a slice would keep the whole file in memory.
    const text = JSON.parse(JSON.stringify(near));
    const place = at - Math.max(begins, at - 200);
    return [
      (at - begins > 30 ? "…" : "") + line(text.slice(Math.max(0, place - 30), place)),
      line(text.slice(place, place + length)),
      line(text.slice(place + length, place + length + 120)),
    ];
  }
}
