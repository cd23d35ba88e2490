// Reads the content of the page: curves as arrays of numbers, missing ones as null.

const CONTENT = JSON.parse(document.getElementById("content").textContent);

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place += 1) {
    bytes[place] = text.charCodeAt(place);
  }
  return bytes.buffer;
}

function integersOf(base64) {
  return Array.from(new Int32Array(bytesOf(base64)));
}

function numbersOf(base64) {
  return Array.from(new Float32Array(bytesOf(base64)), (value) =>
    Number.isFinite(value) ? value : null,
  );
}

function stepsOf(group, number) {
  const written = group.tables[number];
  if (!written.steps) {
    const first = integersOf(written.first);
    const last = written.last ? integersOf(written.last) : first;
    written.steps = { first, last };
  }
  return written.steps;
}

// A metric of a group: {first, last, mean, low, high, runs}, or null. Of a point, `first` and
// `last` are the steps that it stands for; low, high and runs may be null.
function curveOf(group, metric) {
  // A metric may be called what every object has, such as constructor.
  if (!Object.hasOwn(group.curves, metric)) {
    return null;
  }
  const written = group.curves[metric];
  if (!written.read) {
    written.read = {
      ...stepsOf(group, written.table),
      mean: numbersOf(written.mean),
      low: written.low ? numbersOf(written.low) : null,
      high: written.high ? numbersOf(written.high) : null,
      runs: written.runs ? integersOf(written.runs) : null,
      notFinite: written.notFinite || 0,
    };
  }
  return written.read;
}

// The mean over `width` neighbouring points, centred; points without a value stay so.
function smoothed(values, width) {
  if (width <= 1) {
    return values;
  }
  const half = Math.floor(width / 2);
  const sums = [0];
  const counts = [0];
  for (const value of values) {
    sums.push(sums[sums.length - 1] + (value === null ? 0 : value));
    counts.push(counts[counts.length - 1] + (value === null ? 0 : 1));
  }
  return values.map((value, place) => {
    if (value === null) {
      return null;
    }
    const begin = Math.max(0, place - half);
    const end = Math.min(values.length, place + half + 1);
    return (sums[end] - sums[begin]) / (counts[end] - counts[begin]);
  });
}

function lastValueOf(metric) {
  for (const group of CONTENT.groups) {
    const curve = curveOf(group, metric);
    if (curve && curve.mean.length) {
      return curve.mean[curve.mean.length - 1];
    }
  }
  return null;
}
