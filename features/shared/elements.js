// Makes elements and texts. Invariant: whatever a run or a record holds becomes text, never markup;
// there is no way here from a string to markup.
"use strict";

// Set as they are; as attributes they would say only what an element began with.
const PROPERTIES = new Set(["value", "checked", "selected", "disabled", "htmlFor", "type"]);

// Makes an element. An attribute of null, undefined or false is left out; `onclick` and the like
// are functions; children are as appendParts takes them.
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) {
      continue;
    }
    if (name.startsWith("on")) {
      node.addEventListener(name.slice(2), value);
    } else if (PROPERTIES.has(name)) {
      node[name] = value;
    } else {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  appendParts(node, children);
  return node;
}

// Appends elements, texts, and lists of them; nothing for null, undefined and false.
function appendParts(node, parts) {
  for (const part of parts.flat(Infinity)) {
    if (part !== null && part !== undefined && part !== false) {
      node.append(part);
    }
  }
}

// As in 12,345.
function thousands(number) {
  return number.toLocaleString("en-US");
}

// As in "1 metric" and "12,345 metrics".
function plural(count, word) {
  return `${thousands(count)} ${word}${count === 1 ? "" : "s"}`;
}
