// Makes the lines of a chart: {label, color, dash, steps, last, values, low, high, note, view}.

// Lines that are not stacked: of each group those metrics of the chart that it has.
function plainLines(chart) {
  const lines = [];
  const several = CONTENT.groups.length > 1;
  CONTENT.groups.forEach((group, groupNumber) => {
    chart.lines.forEach((line, lineNumber) => {
      const curve = curveOf(group, line.metric);
      const isFirst = lineNumber === 0;
      if (!curve || (several && !isFirst && isNothing(curve))) {
        return;
      }
      const { low, high } = bandOf(group, line, curve);
      lines.push({
        label: several ? labelOfGroup(chart, line, group) : line.label,
        color: lineColor(several ? groupNumber : lineNumber),
        dash: several && lineNumber > 0 ? [6, 4] : null,
        steps: curve.first,
        last: curve.last,
        values: curve.mean,
        low,
        high,
        note: noteOf(group, line, curve),
        view: line.view,
      });
    });
  });
  return lines;
}

// Whether a curve is 0 throughout: beside the lines of other groups it says nothing.
function isNothing(curve) {
  return curve.mean.every((value) => !value);
}

function labelOfGroup(chart, line, group) {
  const [name] = group.name.split(" (");
  return chart.lines.length > 1 ? `${name}: ${line.label}` : group.name;
}

// What lies around a line: metrics of its own where the group is one run, else the smallest and the
// largest behind its points.
function bandOf(group, line, curve) {
  const low = line.low ? curveOf(group, line.low) : null;
  const high = line.high ? curveOf(group, line.high) : null;
  const fits = low && high && low.first === curve.first && high.first === curve.first;
  if (fits && group.runs.length === 1) {
    return { low: low.low || low.mean, high: high.high || high.mean };
  }
  return { low: curve.low, high: curve.high };
}

// What a hover adds to a point's value: the number of tasks, and of runs where it is not all.
function noteOf(group, line, curve) {
  const tasks = line.tasks ? curveOf(group, line.tasks) : null;
  const countRuns = group.runs.length;
  return (place) => {
    const parts = [];
    if (tasks && tasks.mean[place] !== undefined) {
      parts.push(`${formatNumber(tasks.mean[place])} tasks`);
    }
    if (curve.runs && curve.runs[place] < countRuns) {
      parts.push(`${curve.runs[place]} of ${countRuns} runs`);
    }
    return parts.join(", ");
  };
}

// Lines that lie on each other, the lowest first: shares of their sum, or parts of a whole.
function stackedLines(chart, group) {
  const all = partsOf(chart, group);
  all.forEach((part, number) => {
    part.color = lineColor(number);
  });
  // What never came is no part of the picture.
  const parts = all.filter((part) => part.values.some((value) => value > 0));
  if (!parts.length) {
    return [];
  }
  const { first, last } = parts[0];
  const size = first.length;
  const sums = new Array(size).fill(0);
  if (chart.kind === "shares") {
    for (const part of parts) {
      part.values.forEach((value, place) => {
        sums[place] += value;
      });
    }
  }
  const below = new Array(size).fill(0);
  return parts.map((part) => {
    const own = part.values.map((value, place) =>
      chart.kind === "shares" ? (sums[place] > 0 ? value / sums[place] : 0) : value,
    );
    const top = own.map((value, place) => {
      below[place] += value;
      return below[place];
    });
    const { label, color, view } = part;
    return { label, color, view, steps: first, last, values: top, own };
  });
}

function partsOf(chart, group) {
  const curves = chart.lines.map((line) => ({ line, curve: curveOf(group, line.metric) }));
  const present = curves.filter(({ curve }) => curve !== null);
  const whole = chart.whole ? curveOf(group, chart.whole) : null;
  const longest = whole || present.map(({ curve }) => curve).sort(byLength)[0];
  if (!longest) {
    return [];
  }
  const parts = present.map(({ line, curve }) => ({
    label: line.label,
    beside: line.beside || false,
    view: line.view,
    first: longest.first,
    last: longest.last,
    values: valuesAt(longest.first, curve),
  }));
  if (!whole) {
    return parts;
  }
  const within = parts.filter((part) => !part.beside);
  const rest = whole.mean.map((value, place) => {
    const known = within.reduce((sum, part) => sum + part.values[place], 0);
    return Math.max(0, (value || 0) - known);
  });
  const other = { label: "other", first: longest.first, last: longest.last, values: rest };
  return [...within, other, ...parts.filter((part) => part.beside)];
}

function byLength(one, other) {
  return other.first.length - one.first.length;
}

// A curve's values at some steps, 0 where it has none: a section that was not entered took no time.
function valuesAt(steps, curve) {
  if (curve.first === steps) {
    return curve.mean.map((value) => value || 0);
  }
  const byStep = new Map(curve.first.map((step, place) => [step, curve.mean[place]]));
  return steps.map((step) => byStep.get(step) || 0);
}
