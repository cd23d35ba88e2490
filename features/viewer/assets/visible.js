// Shows texts that nobody vouches for: control and bidi characters, lone surrogates and other
// characters without a shape of their own become marks that one can see.
"use strict";

{
  // Of the characters 0 to 31.
  const CONTROLS = (
    "NUL SOH STX ETX EOT ENQ ACK BEL BS TAB LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB "
    + "CAN EM SUB ESC FS GS RS US"
  ).split(" ");
  const NAMES = {
    0x061c: "ALM", 0x200b: "ZWSP", 0x200c: "ZWNJ", 0x200d: "ZWJ", 0x200e: "LRM", 0x200f: "RLM",
    0x2028: "LS", 0x2029: "PS", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF", 0x202d: "LRO",
    0x202e: "RLO", 0x2060: "WJ", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI",
    0x00ad: "SHY", 0xfeff: "BOM", 0x00a0: "NBSP", 0x007f: "DEL", 0xfffd: "BROKEN",
  };
  // Controls but tab and newline, format characters, tags, surrogates that stand alone, private
  // use, characters that are none, and lines of many combining marks.
  const ODD = new RegExp(
    "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u00a0\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4" +
      "\\u17b5\\u180b-\\u180f\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufeff\\uffa0" +
      "\\ufff0-\\uffff\\ue000-\\uf8ff\\u{e0000}-\\u{e0fff}\\u{f0000}-\\u{10ffff}]|\\p{Cs}|" +
      "\\p{M}{9,}",
    "gu",
  );

  function nameOf(character) {
    const code = character.codePointAt(0);
    if (NAMES[code]) return NAMES[code];
    if (code < CONTROLS.length) return CONTROLS[code];
    return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
  }

  function markText(found) {
    if (found.length > 2 && /^\p{M}/u.test(found)) return `⟨${[...found].length} marks⟩`;
    return `⟨${nameOf(found)}⟩`;
  }

  // The text with marks in it, as a string: for attributes and short labels.
  viewer.plainText = (text) => String(text).replace(ODD, markText);

  // The text as nodes: marks are elements, so that they are told from what was said.
  viewer.visible = function (text) {
    const nodes = [];
    let start = 0;
    for (const match of text.matchAll(ODD)) {
      if (match.index > start) nodes.push(text.slice(start, match.index));
      const code = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      const mark = element("span", { class: "odd", title: `U+${code}` }, markText(match[0]));
      nodes.push(mark);
      if (match[0] === "\u2028" || match[0] === "\u2029") nodes.push("\n");
      start = match.index + match[0].length;
    }
    if (start < text.length) nodes.push(text.slice(start));
    return nodes;
  };

  // A block of text; a very long one is shown in part, and whole when one asks for it.
  viewer.block = function (text, className, most = 20000) {
    const block = element("div", { class: `said ${className || ""}`, dir: "auto" });
    if (text.length <= most) {
      appendParts(block, viewer.visible(text));
      return block;
    }
    appendParts(block, viewer.visible(text.slice(0, most)));
    const rest = thousands(text.length - most);
    const more = element("button", { type: "button" }, `… ${rest} more characters`);
    more.addEventListener("click", () => viewer.replace(block, viewer.visible(text)));
    block.append(more);
    return block;
  };
}
