// The table of all episodes: a column a property, a row an episode, in the order of the files.
"use strict";

{
  const NUMBERS = [
    "reward", "tokens", "turns", "mismatch", "ratio", "entropy", "kl", "advantage", "gradient",
    "seconds", "env_seconds", "engine_seconds", "attempts", "rows",
  ];
  const INTEGERS = ["step", "run", "page", "in_page", "text_page", "fates", "val"];
  const FLAGS = ["no_spread", "empty", "stale", "masked", "failed", "cut"];
  const TEXTS = ["uid", "ending", "source", "task", "task_name", "beginning", "tools"];

  // Loads the manifest and all parts of the table.
  viewer.loadTable = async function () {
    const { header } = await viewer.load("manifest", { keep: false });
    const table = { manifest: header, size: header.episodes, ids: [], texts: {}, has: {} };
    for (const name of NUMBERS) table[name] = new Float64Array(table.size);
    for (const name of INTEGERS) table[name] = new Uint32Array(table.size);
    for (const name of FLAGS) table[name] = new Uint8Array(table.size);
    for (const name of TEXTS) {
      table[name] = new Uint32Array(table.size);
      table.texts[name] = [];
    }
    const codes = Object.fromEntries(TEXTS.map((name) => [name, new Map()]));
    const parts = await loadParts(header, "list");
    for (const part of parts) addPart(table, codes, part);
    for (const name of NUMBERS) table.has[name] = table[name].some((value) => !Number.isNaN(value));
    table.hasKinds = table.val.includes(0) && table.val.includes(1);
    table.order = orderOf(table);
    table.places = placesOf(table);
    viewer.table = table;
    return table;
  };

  // The files of a kind that all parts have, in the order of their episodes.
  const loadParts = (manifest, kind) =>
    Promise.all(manifest.parts.map(({ number }) => viewer.load(`${kind}/${number}`, { keep: false })));

  function addPart(table, codes, { header, arrays }) {
    const start = table.ids.length;
    for (const id of header.ids) table.ids.push(id);
    for (const name of [...NUMBERS, ...INTEGERS, ...FLAGS]) table[name].set(arrays[name], start);
    for (const name of TEXTS) {
      const renumbered = header[name].map((text) => codeOf(table.texts[name], codes[name], text));
      arrays[name].forEach((code, i) => (table[name][start + i] = renumbered[code]));
    }
  }

  function codeOf(texts, codes, text) {
    if (!codes.has(text)) {
      codes.set(text, texts.length);
      texts.push(text);
    }
    return codes.get(text);
  }

  // The rows as a reader expects them: by run, first step first, validations last.
  function orderOf(table) {
    const order = Uint32Array.from({ length: table.size }, (_, i) => i);
    return order.sort((a, b) => table.run[a] - table.run[b] || table.val[a] - table.val[b]
      || table.step[a] - table.step[b] || a - b);
  }

  // Which row an episode's address names; of an id that a file holds twice the last.
  function placesOf(table) {
    const places = new Map();
    for (let i = 0; i < table.size; i += 1) places.set(viewer.keyOf(table, i), i);
    return places;
  }

  viewer.keyOf = (table, i) =>
    [table.run[i], table.val[i] ? "val" : "train", table.step[i], table.ids[i].toWellFormed()].join(
      "/",
    );

  viewer.textOf = (name, i) => viewer.table.texts[name][viewer.table[name][i]];

  let answers = null;

  // Loads the ends of all last answers, once; `viewer.answers` has them by row.
  viewer.loadAnswers = function () {
    answers ||= (async () => {
      const parts = await loadParts(viewer.table.manifest, "answers");
      viewer.answers = parts.flatMap(({ header }) => header.answers);
    })();
    return answers;
  };

  // Loads what the page of row i shows: its description, arrays by "row.name", and token texts.
  viewer.loadEpisode = async function (i) {
    const table = viewer.table;
    const name = viewer.numbered("pages", table.page[i]);
    const { header, arrays } = await viewer.load(name);
    const place = table.in_page[i];
    const vocabulary = new Map(header.ids.map((id, k) => [id, header.texts[k]]));
    const found = header.episodes[place];
    const rows = found.rows.map((row, number) => {
      const columns = Object.create(null);
      for (const column of [...row.columns, "prompt_ids", "response_ids"]) {
        columns[column] = arrays[`${place}.${number}.${column}`];
      }
      return { ...row, columns };
    });
    return { ...found, rows, vocabulary, place: i };
  };
}
