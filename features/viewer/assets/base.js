// What every other file uses beside elements.js: numbers as text, and the one global name that the
// files of this folder add to.
"use strict";

const viewer = { views: {} };

viewer.replace = function (node, ...children) {
  node.replaceChildren();
  appendParts(node, children);
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

viewer.percent = function (part, whole) {
  if (!whole) return "0 %";
  const percent = (100 * part) / whole;
  return percent > 0 && percent < 1 ? "< 1 %" : `${Math.round(percent)} %`;
};

// Tells a screen reader what has changed.
viewer.announce = function (text) {
  document.getElementById("announce").textContent = text;
};
