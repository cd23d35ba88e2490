// Keeps the texts that a search looks into: each file of them is loaded once, and stays in memory
// in small letters. How a file is laid out stands in features/viewer/episode_pages.py.
"use strict";

{
  // So many bytes of texts stay in memory; what is beyond is loaded anew for each search.
  viewer.mostTextBytes = 384 * 2 ** 20;
  // So many files are on their way at once: the browser reads some while the page unpacks another.
  const AT_ONCE = 6;
  // Letters whose small form is longer, or depends on what follows, and halves of characters.
  const UNEVEN = /([\u0130\u03a3\ud800-\udfff]+)/;
  const kept = new Map();
  const coming = new Map();
  let keptBytes = 0;
  let isReading = false;

  // Lowers the case of each character by itself, where that leaves it one character.
  viewer.fold = function (text) {
    if (!UNEVEN.test(text)) return text.toLowerCase();
    const parts = text.split(UNEVEN);
    return parts.map((part, k) => (k % 2 ? foldEach(part) : part.toLowerCase())).join("");
  };

  function foldEach(part) {
    let folded = "";
    for (let k = 0; k < part.length; k += 1) {
      const lower = part[k].toLowerCase();
      folded += lower.length === 1 ? lower : part[k];
    }
    return folded;
  }

  // Loads the texts of a file as they were said: {first, ends, whole, size (bytes a character)}.
  viewer.loadTexts = async function (number) {
    const name = viewer.numbered("texts", number);
    const { header, arrays } = await viewer.load(name, { keep: false });
    // A copy: the array itself would keep the whole file in memory.
    const ends = arrays.ends.slice();
    return { first: header.first, ends, whole: decoded(arrays), size: arrays.ascii ? 1 : 2 };
  };

  function decoded({ ascii, units }) {
    if (ascii) return new TextDecoder("latin1").decode(ascii);
    try {
      return new TextDecoder("utf-16le", { fatal: true, ignoreBOM: true }).decode(units);
    } catch {
      // Half of a character is none to a decoder; a page keeps it as it is.
      const parts = [];
      for (let i = 0; i < units.length; i += 8192) {
        parts.push(String.fromCharCode(...units.subarray(i, i + 8192)));
      }
      return parts.join("");
    }
  }

  // Returns what is kept of a file's texts: {first, ends, folded}; undefined where nothing is.
  viewer.keptTexts = (number) => kept.get(number);

  // Loads a file's texts in small letters, {first, ends, folded}, and keeps them if there is room.
  viewer.foldedTexts = function (number) {
    if (kept.has(number)) return Promise.resolve(kept.get(number));
    if (!coming.has(number)) {
      const forget = () => coming.delete(number);
      const found = viewer.loadTexts(number).then(({ first, ends, whole, size }) => {
        const file = { first, ends, folded: viewer.fold(whole) };
        const bytes = whole.length * size;
        if (keptBytes + bytes <= viewer.mostTextBytes) {
          kept.set(number, file);
          keptBytes += bytes;
        }
        return file;
      });
      coming.set(number, found);
      found.then(forget, forget);
    }
    return coming.get(number);
  };

  // How many files of texts there are.
  viewer.countTexts = () => viewer.table.text_page.reduce((most, one) => Math.max(most, one + 1), 0);

  // Loads all files that have room, while the page has nothing else to do.
  viewer.readTexts = async function () {
    if (isReading) return;
    isReading = true;
    const count = viewer.countTexts();
    let next = 0;
    const readOn = async () => {
      while (next < count && keptBytes < viewer.mostTextBytes) {
        const number = next;
        next += 1;
        await hasNothingToDo();
        // A search that needs the file says what is wrong with it.
        await viewer.foldedTexts(number).catch(() => {});
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, readOn));
  };

  const hasNothingToDo = () =>
    new Promise((resolve) => (window.requestIdleCallback || setTimeout)(resolve));
}
