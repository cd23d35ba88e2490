// Addresses behind the #: #list?step=20&sort=-reward, #episode/RUN/KIND/STEP/ID?row=0&token=17.
"use strict";

{
  // A part of an address as text; a damaged one stays as it is.
  function decode(text) {
    try {
      return decodeURIComponent(text.replaceAll("+", " "));
    } catch {
      return text;
    }
  }

  const encode = (text) => encodeURIComponent(String(text).toWellFormed());

  viewer.parseAddress = function (hash) {
    const [path, query] = splitOnce(hash.replace(/^#/, "") || "list", "?");
    const parts = path.split("/").map(decode);
    const values = Object.create(null);
    for (const pair of (query || "").split("&").filter(Boolean)) {
      const [name, value] = splitOnce(pair, "=");
      values[decode(name)] = decode(value || "");
    }
    return { view: parts[0], parts: parts.slice(1), values };
  };

  function splitOnce(text, separator) {
    const place = text.indexOf(separator);
    return place < 0 ? [text, ""] : [text.slice(0, place), text.slice(place + 1)];
  }

  viewer.address = function (parts, values) {
    const query = Object.entries(values || {})
      .filter(([, value]) => value !== undefined && value !== null && value !== "")
      .map(([name, value]) => `${encode(name)}=${encode(value)}`)
      .join("&");
    return `#${parts.map(encode).join("/")}${query ? `?${query}` : ""}`;
  };

  viewer.episodeAddress = function (i, values) {
    const table = viewer.table;
    const kind = table.val[i] ? "val" : "train";
    return viewer.address(["episode", table.run[i], kind, table.step[i], table.ids[i]], values);
  };

  viewer.groupAddress = function (i) {
    const table = viewer.table;
    const kind = table.val[i] ? "val" : "train";
    const uid = viewer.textOf("uid", i);
    return viewer.address(["group", table.run[i], kind, table.step[i], uid]);
  };

  viewer.taskAddress = (i) => viewer.address(["task", viewer.textOf("task", i)]);

  viewer.listAddress = (values) => viewer.address(["list"], values);

  // Changes the address without a new entry in the browser's history.
  viewer.replaceAddress = function (address) {
    history.replaceState(null, "", address);
  };
}
