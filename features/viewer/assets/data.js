// Loads data files: scripts that call viewerData(name, text). How a file is laid out stands in
// features/viewer/data_files.py.
"use strict";

{
  // Pages that stay in memory; the oldest goes.
  const MOST_KEPT = 8;
  // The only addresses a script is ever loaded from.
  const ALLOWED = /^(manifest|data\/(list|answers)\/\d+|data\/(search|pages|texts)\/\d+\/\d+)\.js$/;
  const TYPES = {
    "<f4": Float32Array, "<f8": Float64Array, "<i4": Int32Array, "<i2": Int16Array,
    "|i1": Int8Array, "|u1": Uint8Array, "<u4": Uint32Array, "<u2": Uint16Array,
  };
  const waiting = new Map();
  const kept = new Map();
  const coming = new Map();

  const policy = window.trustedTypes
    ? trustedTypes.createPolicy("viewer-data", { createScriptURL: checked })
    : { createScriptURL: checked };

  function checked(address) {
    if (!ALLOWED.test(address)) throw new TypeError(`no data file: ${address}`);
    return address;
  }

  // The data files call this.
  window.viewerData = function (name, text) {
    const entry = waiting.get(name);
    if (entry) entry.text = text;
  };

  function request(name) {
    return new Promise((resolve, reject) => {
      const entry = { text: null };
      waiting.set(name, entry);
      const script = document.createElement("script");
      script.src = policy.createScriptURL(`${name === "manifest" ? "" : "data/"}${name}.js`);
      script.onload = () => finish(entry.text);
      script.onerror = () => finish(null);
      function finish(found) {
        script.remove();
        waiting.delete(name);
        if (found === null) reject(new Error(`${name}.js is missing or damaged`));
        else resolve(found);
      }
      document.head.append(script);
    });
  }

  async function unpack(text) {
    const buffer = await inflated(fromBase64(text));
    const length = new DataView(buffer).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    return { header, arrays: arraysOf(header.arrays, buffer, length + 4) };
  }

  async function inflated(packed) {
    const stream = new DecompressionStream("deflate");
    // Written into it by hand: a Blob would send the bytes to another process and back.
    const writer = stream.writable.getWriter();
    const written = Promise.all([writer.write(packed), writer.close()]);
    const [buffer] = await Promise.all([new Response(stream.readable).arrayBuffer(), written]);
    return buffer;
  }

  function fromBase64(text) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
    return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  }

  function arraysOf(described, buffer, start) {
    const arrays = Object.create(null);
    for (const [name, entry] of Object.entries(described)) {
      if (typeof entry === "string") {
        arrays[name] = arrays[entry];
        continue;
      }
      const [dtype, entries, position, repeated] = entry;
      const array = new TYPES[dtype](buffer, start + position, entries);
      arrays[name] = repeated ? new TYPES[dtype](repeated).fill(array[0]) : array;
    }
    return arrays;
  }

  // Loads a data file; one that is on its way or still in memory is not asked for again.
  viewer.load = function (name, { keep = true } = {}) {
    let found = kept.get(name) || coming.get(name);
    if (!found) {
      found = request(name).then(unpack);
      coming.set(name, found);
      const arrived = () => coming.delete(name);
      found.then(arrived, arrived);
    }
    if (keep) remember(name, found);
    return found;
  };

  // The files that were asked for last stay in memory; one that could not be read does not.
  function remember(name, found) {
    kept.delete(name);
    kept.set(name, found);
    found.catch(() => kept.delete(name));
    if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
  }

  viewer.numbered = (kind, number) => `${kind}/${Math.floor(number / 1000)}/${number}`;
}
