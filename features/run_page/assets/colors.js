// Gives lines their colours, which the style sheet names for light and dark.

const LINE_COLORS = 16;

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function lineColor(number) {
  return color(`line-${number % LINE_COLORS}`);
}

// A colour (#rrggbb) that lets what lies behind it be seen.
function translucent(hex, alpha) {
  const parts = [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
  return `rgba(${parts.join(",")},${alpha})`;
}
