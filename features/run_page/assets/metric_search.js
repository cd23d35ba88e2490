// Finds any metric by its name or its sentence, and draws the chosen ones.

const MOST_FOUND = 200;

class MetricSearch {
  constructor(marks, onChange) {
    this.marks = marks;
    this.onChange = onChange;
    this.charts = new Map();
    this.grid = element("div", { class: "charts" });
    this.input = element("input", {
      type: "search",
      placeholder: `a name or a word, of ${plural(CONTENT.metrics.length, "metric")}`,
      "aria-label": "search metrics",
    });
    this.input.addEventListener("input", () => this.list());
    this.found = element("div", { class: "found" });
    this.node = element("div", {}, [this.input, this.grid, this.found]);
    this.list();
  }

  get chosen() {
    return [...this.charts.keys()];
  }

  list() {
    const words = this.input.value.toLowerCase().split(/\s+/).filter((word) => word);
    const fitting = CONTENT.metrics.filter((metric) => {
      const text = `${metric.name} ${metric.meaning}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const rows = fitting.slice(0, MOST_FOUND).map((metric) => [
      this.chooser(metric),
      lastValueOf(metric.name),
      metric.unit,
      prose(metric.meaning),
    ]);
    const headings = ["metric", "last", "unit", "what it means"];
    this.found.replaceChildren(table(headings, rows, { isOfOneKind: false }));
    if (fitting.length > MOST_FOUND) {
      const more = `${fitting.length - MOST_FOUND} more; another word leaves fewer`;
      this.found.append(element("p", {}, [more]));
    }
  }

  chooser(metric) {
    const node = button(metric.name, "draw it, or take it away", () => {
      this.toggle(metric.name);
      node.classList.toggle("on", this.charts.has(metric.name));
    });
    node.classList.add("metric");
    node.classList.toggle("on", this.charts.has(metric.name));
    return node;
  }

  toggle(name) {
    const metric = CONTENT.metrics.find((one) => one.name === name);
    if (!metric) {
      return;
    }
    const drawn = this.charts.get(name);
    if (drawn) {
      drawn.node.remove();
      this.charts.delete(name);
    } else {
      const chart = this.chartOf(metric);
      this.charts.set(name, chart);
      this.grid.append(chart.node);
    }
    this.onChange();
  }

  chartOf(metric) {
    const described = { lines: [{ metric: metric.name, label: metric.name }] };
    return new Chart(metric.name, metric.unit, () => plainLines(described), {
      meaning: metric.meaning,
      marks: this.marks,
      viewer: viewerOfCharts(),
      view: "kind=train&sort=-reward",
      onClose: () => {
        this.toggle(metric.name);
        this.list();
      },
    });
  }

  redraw() {
    this.charts.forEach((chart) => chart.plot && chart.draw());
  }
}
