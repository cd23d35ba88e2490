// What every other file uses: elements, numbers as text, and the one global name.
"use strict";

const viewer = { views: {} };

// Makes an element. Whatever a record holds reaches the page through `children` and attributes
// alone, as text; there is no way here from a string to markup.
viewer.el = function (tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in viewer.properties) element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  viewer.append(element, children);
  return element;
};

viewer.properties = { value: 1, checked: 1, selected: 1, disabled: 1, htmlFor: 1, type: 1 };

// Appends elements and texts; nothing for null.
viewer.append = function (element, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
};

viewer.replace = function (element, ...children) {
  element.replaceChildren();
  viewer.append(element, children);
};

// A number in few digits: 0.1235, 12.35, 1.235e-7; texts ("NaN") as they are.
viewer.short = function (value, digits = 4) {
  if (typeof value === "string") return value;
  if (typeof value !== "number") return String(value);
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return sign(String(value));
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e6) return sign(value.toExponential(digits - 2));
  return sign(String(Number(value.toPrecision(digits))));
};

// A number as it was recorded: the shortest that reads back as the same float32, or double.
viewer.exact = function (value, isFloat32) {
  if (typeof value !== "number" || !Number.isFinite(value)) return viewer.short(value);
  if (!isFloat32) return sign(String(value));
  for (let digits = 1; digits <= 9; digits += 1) {
    const text = value.toPrecision(digits);
    if (Math.fround(Number(text)) === value) return sign(String(Number(text)));
  }
  return sign(String(value));
};

function sign(text) {
  return text.replace("-", "−");
}

// 12,345
viewer.count = (number) => number.toLocaleString("en-US");

viewer.percent = function (part, whole) {
  if (!whole) return "0 %";
  const percent = (100 * part) / whole;
  return percent > 0 && percent < 1 ? "< 1 %" : `${Math.round(percent)} %`;
};

viewer.plural = (number, word) => `${viewer.count(number)} ${word}${number === 1 ? "" : "s"}`;

// Tells a screen reader what has changed.
viewer.announce = function (text) {
  document.getElementById("announce").textContent = text;
};
