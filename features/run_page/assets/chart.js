// Draws a chart by uPlot, with a legend, a hover and marks of what happened to the run.

const CHART_HEIGHT = 230;
const CURSORS = uPlot.sync("steps");
// What all charts have in common: how many points are averaged.
const VIEW = { smoothing: 1 };
// A click that moved further is a drag, which zooms.
const CLICK_PIXELS = 4;

// A chart on the page: a frame at once, the drawing when it comes into sight.
class Chart {
  constructor(title, unit, makeLines, options = {}) {
    this.title = title;
    this.unit = unit;
    this.makeLines = makeLines;
    this.options = options;
    this.isLogarithmic = false;
    this.hidden = new Set();
    this.plot = null;
    this.isVisible = false;
    this.legend = element("div", { class: "legend" });
    this.area = element("div", { class: "area", tabindex: "0", role: "group",
      "aria-label": `${title}: arrow keys go along the steps, Enter keeps the values` });
    this.area.addEventListener("keydown", (event) => this.hover?.press(event));
    // Whether the axis spans outliers, too.
    this.isWhole = false;
    this.beyond = element("p", { class: "beyond" });
    this.beyond.hidden = true;
    this.node = element("figure", { class: "chart" },
      [this.heading(), this.legend, this.area, this.beyond]);
    this.observe();
  }

  heading() {
    const tools = [];
    if (!this.options.isStacked) {
      tools.push(button("log", "logarithmic axis", (node) => {
        this.isLogarithmic = !this.isLogarithmic;
        node.classList.toggle("on", this.isLogarithmic);
        this.draw();
      }));
    }
    tools.push(button("wide", "over the whole width", (node) => {
      this.node.classList.toggle("wide");
      node.classList.toggle("on");
    }));
    if (this.options.onClose) {
      tools.push(button("×", "take this chart away", this.options.onClose));
    }
    const caption = element("figcaption", {}, [
      element("span", { class: "title", title: this.options.meaning || "" }, [this.title]),
      element("span", { class: "tools" }, tools),
    ]);
    if (!this.options.meaning) {
      return caption;
    }
    const meaning = element("p", { class: "meaning" }, [prose(this.options.meaning)]);
    return element("div", {}, [caption, meaning]);
  }

  observe() {
    new IntersectionObserver((entries) => {
      this.isVisible = entries.some((entry) => entry.isIntersecting);
      if (this.isVisible && !this.plot) {
        this.draw();
      }
    }, { rootMargin: "300px" }).observe(this.area);
    new ResizeObserver(() => {
      if (this.plot && this.area.clientWidth !== this.plot.width) {
        this.plot.setSize({ width: this.area.clientWidth, height: CHART_HEIGHT });
      }
    }).observe(this.area);
  }

  draw() {
    if (this.plot) {
      this.plot.destroy();
      this.plot = null;
    }
    this.lines = this.makeLines();
    this.drawLegend();
    const drawn = this.lines.filter((line) => !this.hidden.has(line.label));
    this.drawn = drawn;
    this.area.replaceChildren();
    this.tellOfOutliers();
    if (!drawn.length) {
      this.area.append(element("p", { class: "empty" }, ["nothing to draw"]));
      return;
    }
    const { tables, series, bands } = this.seriesOf(drawn);
    this.plot = new uPlot(this.settings(series, bands), uPlot.join(tables), this.area);
    this.hover = new Hover(this, drawn);
    const canvas = this.area.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", this.described());
  }

  // The chart in words: of each line where it begins, and where it ends.
  described() {
    const lines = this.drawn.map((line) => {
      const values = (line.own || line.values).filter((value) => value !== null);
      const ends = values.length
        ? `${formatNumber(values[0])} to ${formatNumber(values[values.length - 1])}` : "no values";
      return `${line.label}: ${ends}`;
    });
    const steps = this.drawn.flatMap((line) => [line.steps[0], line.last[line.last.length - 1]]);
    return `${this.title}, in ${this.unit}, steps ${Math.min(...steps)} to ${Math.max(...steps)}. ` +
      `${lines.join("; ")}.`;
  }

  // Values of the drawn lines, at the steps from `first` to `last`; of points with their bars.
  valuesWithin(first, last) {
    return this.drawn.flatMap((line) => {
      const parts = this.options.isOfPoints && line.low && line.high
        ? [line.values, line.low, line.high] : [line.values];
      return parts.flatMap((values) => values.filter((value, place) =>
        value !== null && line.steps[place] >= first && line.steps[place] <= last));
    });
  }

  // Says how many points lie beyond the axis, with the way to see them.
  tellOfOutliers() {
    const isExact = this.options.isStacked || this.isLogarithmic;
    const { beyond, low, high } = isExact ? { beyond: 0 } : robustRange(this.valuesWithin(-1, Infinity));
    this.beyond.hidden = !beyond;
    if (!beyond) {
      return;
    }
    const all = this.valuesWithin(-1, Infinity);
    const farthest = all.filter((value) => value < low || value > high)
      .sort((one, other) => Math.abs(other) - Math.abs(one))[0];
    const words = this.isWhole
      ? `${plural(beyond, "value")} far from the others: `
      : `${plural(beyond, "value")} beyond the axis (▲▼), as far as ${formatNumber(farthest)}: `;
    const label = this.isWhole ? "leave out" : "show";
    this.beyond.replaceChildren(words, button(label, "the axis with or without them", () => {
      this.isWhole = !this.isWhole;
      this.draw();
    }));
  }

  drawLegend() {
    // The topmost of a stack stands first.
    const lines = this.options.isStacked ? [...this.lines].reverse() : this.lines;
    this.legend.replaceChildren(...lines.map((line) => {
      const swatch = element("i");
      swatch.style.background = line.dash
        ? `repeating-linear-gradient(90deg, ${line.color} 0 3px, transparent 3px 5px)`
        : line.color;
      const item = button(line.label, "hide or show this line", () => {
        if (!this.hidden.delete(line.label)) {
          this.hidden.add(line.label);
        }
        this.draw();
      });
      item.prepend(swatch);
      item.classList.toggle("off", this.hidden.has(line.label));
      return item;
    }));
    if (this.options.leftOut) {
      const words = `and ${this.options.leftOut} more, by their names below`;
      this.legend.append(element("span", {}, [words]));
    }
  }

  // The tables that uPlot joins, its series, and its bands between pairs of these.
  seriesOf(lines) {
    const tables = [];
    const series = [{}];
    const bands = [];
    const add = (steps, values, style) => {
      tables.push([steps, this.shown(values)]);
      series.push({ spanGaps: false, ...style });
      return series.length - 1;
    };
    const none = { stroke: null, width: 0, points: { show: false } };
    lines.forEach((line) => {
      if (line.low && line.high && !this.options.isOfPoints) {
        const high = add(line.steps, line.high, none);
        const low = add(line.steps, line.low, none);
        bands.push({ series: [high, low], fill: translucent(line.color, 0.16) });
      }
      line.place = this.addLine(line, add);
    });
    if (this.options.isStacked) {
      fillStack(lines, series, bands);
    }
    return { tables, series, bands };
  }

  addLine(line, add) {
    const width = this.options.isExact ? 1 : VIEW.smoothing;
    // Filled areas touch each other: a heavy outline would hide a thin one.
    const outline = this.options.isStacked ? 0.6 : 1.6;
    const style = { stroke: line.color, width: outline, dash: line.dash || undefined };
    style.points = this.options.isStacked ? { show: false } : { size: 5, fill: line.color };
    if (this.options.isOfPoints) {
      // Between two validations nothing was measured.
      style.width = 0.6;
      style.dash = [2, 4];
      style.points = { show: true, size: 8, fill: line.color };
    }
    if (width > 1 && line.values.length > 2) {
      const faint = { stroke: translucent(line.color, 0.3), width: 1, points: { show: false } };
      add(line.steps, line.values, faint);
      style.points = { show: false };
    }
    return add(line.steps, smoothed(this.withoutOutliers(line.values, width), width), style);
  }

  // One value far from the others is marked; it does not move the mean of its neighbours.
  withoutOutliers(values, width) {
    if (width <= 1 || this.isWhole || this.isLogarithmic) {
      return values;
    }
    const { low, high, beyond } = robustRange(values);
    return beyond
      ? values.map((value) => (value === null || value < low || value > high ? null : value))
      : values;
  }

  // On a logarithmic axis only what is above zero has a place.
  shown(values) {
    if (!this.isLogarithmic) {
      return values;
    }
    return values.map((value) => (value !== null && value > 0 ? value : null));
  }

  settings(series, bands) {
    const ink = color("faint-ink");
    const axis = {
      stroke: ink,
      grid: { stroke: color("grid"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
      labelFont: "11px system-ui, sans-serif",
      labelSize: 16,
      labelGap: 0,
    };
    const steps = { ...axis, label: "step", size: 24, space: 60 };
    steps.incrs = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6];
    const values = { ...axis, label: this.unit, size: 56 };
    values.values = (plot, splits) =>
      (this.isLogarithmic ? splits.map((value) => (value === null ? "" : formatNumber(value)))
        : axisNumbers(splits));
    return {
      width: this.area.clientWidth,
      height: CHART_HEIGHT,
      legend: { show: false },
      scales: { x: { time: false, range: rangeOfSteps }, y: this.scaleOfValues() },
      axes: [steps, values],
      cursor: { sync: { key: CURSORS.key, scales: ["x", null] }, points: { size: 6 }, y: false,
        // A drag across zooms into steps on all charts, one up or down into values, here alone.
        drag: { x: true, y: true, uni: 24 } },
      series,
      bands,
      hooks: {
        drawClear: [(plot) => drawMarks(plot, this.options.marks || [])],
        draw: [
          (plot) => this.options.isOfPoints && drawBars(plot, this.drawn),
          (plot) => drawOutliers(plot, this.drawn),
        ],
        setCursor: [() => this.hover && this.hover.follow()],
      },
    };
  }

  scaleOfValues() {
    if (this.isLogarithmic) {
      return { distr: 3 };
    }
    if (this.options.isStacked) {
      return { range: rangeOfStack };
    }
    return { range: (plot, low, high) => this.rangeOfAxis(plot, low, high) };
  }

  // What the values at the steps in sight span, and the bands around them that stay near.
  rangeOfAxis(plot, low, high) {
    const { min, max } = plot.scales.x;
    const isAll = min === null || min === undefined;
    const values = this.valuesWithin(isAll ? -1 : min, isAll ? Infinity : max);
    const robust = robustRange(values);
    if (this.options.isOfPoints && robust.low !== null) {
      return rangeOfValues(plot, robust.low, robust.high);
    }
    if (this.isWhole || !robust.beyond) {
      return rangeOfValues(plot, low, high);
    }
    const room = robust.high - robust.low;
    return rangeOfValues(plot, Math.max(low, robust.low - room), Math.min(high, robust.high + room));
  }
}

// One step alone stands within the steps of its run, with room behind it.
function rangeOfSteps(plot, low, high) {
  const steps = plot.data[0] || [];
  if (steps.length !== 1) {
    return [low, high];
  }
  const last = Math.max(...CONTENT.runs.map((run) => run.lastStep));
  return [0, Math.max(last, steps[0] + 1)];
}

function rangeOfStack(plot, low, high) {
  return [0, high || 1];
}

// What is 0 throughout is given a small axis, as it is mostly a count or a share.
function rangeOfValues(plot, low, high) {
  if (low === null || (low === 0 && high === 0)) {
    return [0, 1];
  }
  return uPlot.rangeNum(low, high, 0.1, true);
}

// Draws each point's interval as a bar.
function drawBars(plot, lines) {
  const { ctx } = plot;
  const cap = 4 * devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
  ctx.clip();
  ctx.lineWidth = 1.5 * devicePixelRatio;
  for (const line of lines.filter(({ low, high }) => low && high)) {
    ctx.strokeStyle = line.color;
    line.steps.forEach((step, place) => {
      if (line.low[place] === null || line.high[place] === null) {
        return;
      }
      const x = plot.valToPos(step, "x", true);
      const [top, bottom] = [line.high[place], line.low[place]].map((value) =>
        plot.valToPos(value, "y", true));
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, bottom);
      for (const end of [top, bottom]) {
        ctx.moveTo(x - cap, end);
        ctx.lineTo(x + cap, end);
      }
      ctx.stroke();
    });
  }
  ctx.restore();
}

// Marks at the edge of the axis the points that lie beyond it.
function drawOutliers(plot, lines) {
  const { ctx, bbox } = plot;
  const { min, max } = plot.scales.y;
  const size = 5 * devicePixelRatio;
  ctx.save();
  for (const line of lines) {
    ctx.fillStyle = line.color;
    line.values.forEach((value, place) => {
      const x = plot.valToPos(line.steps[place], "x", true);
      const isInside = value === null || (value >= min && value <= max);
      if (isInside || x < bbox.left || x > bbox.left + bbox.width) {
        return;
      }
      const isAbove = value > max;
      const tip = isAbove ? bbox.top : bbox.top + bbox.height;
      const base = tip + (isAbove ? 1.6 : -1.6) * size;
      ctx.beginPath();
      ctx.moveTo(x, tip);
      ctx.lineTo(x - size, base);
      ctx.lineTo(x + size, base);
      ctx.fill();
    });
  }
  ctx.restore();
}

// Fills what lies between each line of a stack and the one below it.
function fillStack(lines, series, bands) {
  lines.forEach((line, number) => {
    const fill = translucent(line.color, 0.55);
    if (number === 0) {
      series[line.place].fill = fill;
    } else {
      bands.push({ series: [line.place, lines[number - 1].place], fill });
    }
  });
}

// Marks the steps at which something happened to the run, behind the lines.
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  for (const mark of marks) {
    const x = Math.round(plot.valToPos(mark.step, "x", true));
    if (x >= bbox.left && x <= bbox.left + bbox.width) {
      ctx.strokeStyle = translucent(color(`mark-${mark.kind}`), 0.6);
      ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
  }
  ctx.restore();
}
