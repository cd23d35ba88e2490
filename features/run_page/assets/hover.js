// Shows the values under the pointer; a click keeps them, with a link to the episodes of the step.

class Hover {
  constructor(chart, lines) {
    this.chart = chart;
    this.plot = chart.plot;
    this.lines = lines;
    this.isInside = false;
    this.isKept = false;
    this.box = element("div", { class: "hover", "aria-live": "polite" });
    this.box.hidden = true;
    this.plot.over.append(this.box);
    this.listen();
  }

  listen() {
    const { over } = this.plot;
    over.addEventListener("mouseenter", () => {
      this.isInside = true;
    });
    over.addEventListener("mouseleave", () => {
      this.isInside = false;
      this.box.hidden = !this.isKept;
    });
    let pressedAt = [0, 0];
    over.addEventListener("mousedown", (event) => {
      pressedAt = [event.clientX, event.clientY];
    });
    over.addEventListener("click", (event) => {
      const [x, y] = pressedAt;
      const moved = Math.max(Math.abs(event.clientX - x), Math.abs(event.clientY - y));
      const isDrag = moved > CLICK_PIXELS;
      if (!isDrag && !this.box.contains(event.target)) {
        this.isKept = !this.isKept;
        this.box.classList.toggle("kept", this.isKept);
        this.show();
      }
    });
  }

  // Arrow keys go along the steps, Enter keeps the values, Escape lets them go.
  press(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
    const steps = this.plot.data[0];
    const ends = { Home: 0, End: steps.length - 1 };
    if (event.target !== this.chart.area) {
      return;
    }
    if (event.key in moves || event.key in ends) {
      const by = moves[event.key] || 0;
      const from = this.plot.cursor.idx ?? (by < 0 ? steps.length : -1);
      const to = event.key in ends ? ends[event.key] : from + by;
      const place = Math.min(steps.length - 1, Math.max(0, to));
      this.isInside = true;
      this.isKept = false;
      this.box.classList.remove("kept");
      const left = this.plot.valToPos(steps[place], "x");
      this.plot.setCursor({ left, top: this.plot.over.clientHeight / 2 });
    } else if (event.key === "Enter") {
      this.isKept = true;
      this.box.classList.add("kept");
      this.show();
    } else if (event.key === "Escape") {
      this.isInside = false;
      this.isKept = false;
      this.box.classList.remove("kept");
      this.show();
    } else {
      return;
    }
    event.preventDefault();
  }

  follow() {
    if (!this.isKept) {
      this.show();
    }
  }

  show() {
    const place = this.plot.cursor.idx;
    const isShown = this.isInside && place !== null && place !== undefined;
    this.box.hidden = !isShown;
    if (!isShown) {
      return;
    }
    const step = this.plot.data[0][place];
    const found = this.lines
      .map((line) => ({ line, at: nearest(line.steps, step) }))
      .filter(({ line, at }) => at !== null && line.values[at] !== null);
    const here = found.filter(({ line, at }) => line.steps[at] === step);
    const shown = here.length ? here : found;
    const first = shown[0];
    const title = first ? stepsTitle(first.line, first.at) : `step ${step}`;
    const rows = this.chart.options.isStacked ? [...shown].reverse() : shown;
    this.box.replaceChildren(
      element("b", {}, [title]),
      ...rows.map(({ line, at }) => this.rowOf(line, at, step)),
      ...this.hintOf(step),
    );
    this.move(step);
  }

  rowOf(line, at, step) {
    const swatch = element("i");
    swatch.style.background = line.color;
    const value = line.own ? line.own[at] : line.values[at];
    const parts = [element("strong", {}, [formatNumber(value)])];
    if (line.low && line.high && line.low[at] !== null && line.low[at] !== undefined) {
      const band = `${formatNumber(line.low[at])} … ${formatNumber(line.high[at])}`;
      parts.push(element("small", {}, [band]));
    }
    const note = line.note ? line.note(at) : "";
    if (note) {
      parts.push(element("small", {}, [note]));
    }
    return element("div", {}, [swatch, this.labelOf(line, step), ...parts]);
  }

  // A line's name, which leads to the episodes behind it once the values are kept.
  labelOf(line, step) {
    const { viewer } = this.chart.options;
    if (!this.isKept || !line.view || !viewer || !viewer.isThere) {
      return element("span", {}, [line.label]);
    }
    return element("a", { href: `${viewer.href}#list?step=${step}&${line.view}` }, [line.label]);
  }

  // Where the episodes of a step can be seen.
  hintOf(step) {
    const { view, viewer } = this.chart.options;
    if (!view || !viewer) {
      return [];
    }
    if (!this.isKept) {
      return [element("small", { class: "hint" }, ["click: links to its episodes"])];
    }
    const href = `${viewer.href}#list?step=${step}&${view}`;
    const link = element("a", { href }, [`episodes of step ${step}`]);
    const once = "once the viewer is made, by the command above";
    return viewer.isThere ? [link] : [link, element("small", {}, [` ${once}`])];
  }

  move(step) {
    const x = this.plot.valToPos(step, "x");
    // On the left there is more room, over the axis.
    const isRight = x > 0.45 * this.plot.over.clientWidth;
    this.box.style.left = isRight ? "auto" : `${x + 12}px`;
    this.box.style.right = isRight ? `${this.plot.over.clientWidth - x + 12}px` : "auto";
  }
}

// The place of the step, or of the nearest one that the line has.
function nearest(steps, step) {
  let low = 0;
  let high = steps.length - 1;
  if (high < 0) {
    return null;
  }
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low > 0 && step - steps[low - 1] < steps[low] - step) {
    return low - 1;
  }
  return low;
}

function stepsTitle(line, at) {
  const first = line.steps[at];
  const last = line.last[at];
  return first === last ? `step ${first}` : `steps ${first} to ${last}, mean (smallest … largest)`;
}
