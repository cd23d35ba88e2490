// Puts the page together, and keeps what was chosen in its address.

const SMOOTHINGS = [1, 3, 5, 9, 17, 33, 65];
const MARKED = ["resume", "restart", "settings"];
const MARK_NAMES = {
  resume: "resumed",
  restart: "restarted",
  settings: "settings changed",
  alarm: "alarm",
};
// Of many alarms the first ones are marked on charts; the time line has all.
const MOST_ALARM_MARKS = 200;
const MOST_STACKED_GROUPS = 4;
const QUIET_MS = 15000;
const ALWAYS_DRAWN = ["reward", "validation"];

const chosen = new URLSearchParams(location.hash.slice(1));
const charts = [];
let lastTouched = 0;

function marksOf(runs) {
  if (runs.length > 1) {
    return [];
  }
  const marks = runs[0].events.filter((event) => MARKED.includes(event.kind));
  const alarms = runs[0].alarms.slice(0, MOST_ALARM_MARKS);
  return [...marks, ...alarms.map((alarm) => ({ step: alarm.step, kind: "alarm" }))];
}

function makeCharts(marks) {
  const viewer = viewerOfCharts();
  const zeros = [];
  for (const described of CONTENT.charts) {
    const options = { marks, viewer, view: described.view, leftOut: described.leftOut };
    if (isZeroThroughout(described)) {
      zeros.push(described.title);
      continue;
    }
    if (described.kind === "lines") {
      const makeLines = () => plainLines(described);
      // A validation has few points, and each counts.
      options.isExact = described.key === "validation";
      options.isOfPoints = options.isExact && CONTENT.runs.length === 1;
      charts.push(new Chart(described.title, described.unit, makeLines, options));
      continue;
    }
    for (const group of CONTENT.groups.slice(0, MOST_STACKED_GROUPS)) {
      const several = CONTENT.groups.length > 1;
      const title = several ? `${described.title}: ${group.name}` : described.title;
      const makeLines = () => stackedLines(described, group);
      const stacked = { ...options, isStacked: true, isExact: true };
      charts.push(new Chart(title, described.unit, makeLines, stacked));
    }
  }
  return element("div", {}, [
    chartsLegend(marks),
    element("div", { class: "charts" }, charts.map((chart) => chart.node)),
    zeros.length ? element("p", { class: "aside" }, [`0 throughout: ${zeros.join(", ")}.`]) : "",
  ]);
}

// Whether a chart has nothing but zeros; a reward of 0 is always drawn.
function isZeroThroughout(described) {
  if (ALWAYS_DRAWN.includes(described.key)) {
    return false;
  }
  return CONTENT.groups.every((group) => described.lines.every((line) => {
    const curve = curveOf(group, line.metric);
    return !curve || (curve.mean.every((value) => value === 0) && !curve.notFinite);
  }));
}

// Says once what bands and dashed marks of all charts are.
function chartsLegend(marks) {
  const bands = CONTENT.runs.length === 1
    ? "A bar is a validation's interval; a band spans lengths from the shortest to the longest, and " +
      "where a point stands for several steps the smallest and the largest of them."
    : "A line is the mean of its runs; its band spans the smallest and the largest of them.";
  const kinds = new Set(marks.map((mark) => mark.kind));
  const swatches = [...kinds].map((kind) => {
    const swatch = element("i");
    swatch.style.borderColor = color(`mark-${kind}`);
    return element("span", { class: "markname" }, [swatch, MARK_NAMES[kind]]);
  });
  const use = " Drag across to zoom into steps, up or down into values, double click for the " +
    "whole; a click keeps the values, with links to the episodes behind them. ";
  return element("p", { class: "aside" }, [bands, use, ...swatches]);
}

function smoothingControl(search) {
  const select = element("select", { "aria-label": "smoothing" });
  for (const width of SMOOTHINGS) {
    const words = width === 1 ? "none" : `${width} points`;
    select.append(element("option", { value: width }, [words]));
  }
  select.value = String(VIEW.smoothing);
  select.addEventListener("change", () => {
    VIEW.smoothing = Number(select.value);
    redraw(search);
    keepChoice(search);
  });
  return element("label", {}, ["smoothing ", select]);
}

function firstSmoothing() {
  const asked = Number(chosen.get("smoothing"));
  if (SMOOTHINGS.includes(asked)) {
    return asked;
  }
  return CONTENT.runs.every((run) => run.lastStep < 15) ? 1 : 5;
}

function redraw(search) {
  charts.forEach((chart) => chart.plot && chart.draw());
  search.redraw();
}

function keepChoice(search) {
  const parts = new URLSearchParams({ smoothing: VIEW.smoothing });
  search.chosen.forEach((name) => parts.append("metric", name));
  history.replaceState(null, "", `#${parts}`);
}

// While the run goes on the page is read again, unless somebody is using it.
function reloadControl() {
  if (!CONTENT.rewrittenEvery || !CONTENT.runs.some((run) => run.isRunning)) {
    return "";
  }
  const box = element("input", { type: "checkbox" });
  box.checked = true;
  setInterval(() => {
    const isQuiet = Date.now() - lastTouched > QUIET_MS;
    if (box.checked && isQuiet && !document.hidden) {
      location.reload();
    }
  }, 1000 * CONTENT.rewrittenEvery);
  return element("label", {}, [box, " follow the run"]);
}

function sectionsOf(search, marks) {
  const runs = CONTENT.runs;
  const [run] = runs;
  const isOne = runs.length === 1;
  const sections = [];
  if (isOne) {
    sections.push(["", "", summaryTiles(run)]);
  } else {
    sections.push(["runs", "Runs", runsTable()]);
  }
  if (CONTENT.differences.rows.length) {
    sections.push(["differences", "What differs", differencesTable()]);
  }
  runs.filter((one) => one.alarms.length).forEach((one) => {
    const title = isOne ? "Alarms" : `Alarms of ${one.name}`;
    sections.push([isOne ? "alarms" : "", title, alarmTable(one)]);
  });
  if (viewerOfCharts()) {
    sections.push(["episodes", "Episodes worth a look", episodeLinks(run)]);
  }
  sections.push(["charts", "Curves", makeCharts(marks)]);
  if (isOne) {
    sections.push(...sectionsOfOne(run));
  }
  sections.push(["metrics", "Every metric", search.node]);
  return sections;
}

function sectionsOfOne(run) {
  const sections = [];
  const line = timeLine(run);
  if (line) {
    sections.push(["timeline", "What happened", line]);
  }
  if (run.stepTimes.steps.length) {
    sections.push(["time", "Seconds of the last steps", stepTimeTable(run)]);
  }
  run.tables.forEach((own, number) => {
    sections.push([`table${number}`, own.title, ownTable(own)]);
  });
  if (run.changes.length) {
    sections.push(["changes", "Settings that changed", changesTable(run)]);
  }
  if (run.settings.length) {
    sections.push(["settings", "Settings that are not the defaults", settingsTable(run)]);
  }
  return sections;
}

function head(sections, search) {
  const links = sections
    .filter(([id, title]) => id && title)
    .map(([id, title]) => {
      const link = element("a", { href: `#${id}` }, [title]);
      link.addEventListener("click", (event) => {
        // The address keeps what was chosen.
        event.preventDefault();
        document.getElementById(id).scrollIntoView({ behavior: "smooth" });
      });
      return link;
    });
  const controls = element("div", { class: "controls" }, [
    smoothingControl(search),
    reloadControl(),
  ]);
  return [
    element("header", {}, [
      element("h1", {}, [CONTENT.title]),
      ...(CONTENT.runs.length === 1 ? [runHead(CONTENT.runs[0])] : []),
      writtenLine(),
    ]),
    element("nav", {}, [...links, controls]),
  ];
}

// Tells the style how high the bar is that stays in sight, which sections are not to hide under.
function followBar(bar) {
  new ResizeObserver(() => {
    document.documentElement.style.setProperty("--bar-height", `${bar.offsetHeight}px`);
  }).observe(bar);
}

function makePage() {
  VIEW.smoothing = firstSmoothing();
  const marks = marksOf(CONTENT.runs);
  const search = new MetricSearch(marks, () => keepChoice(search));
  const sections = sectionsOf(search, marks);
  const nodes = sections.map(([id, title, node]) =>
    title ? section(id || title, title, [node]) : node,
  );
  document.body.append(...head(sections, search), element("main", {}, nodes));
  followBar(document.querySelector("nav"));
  chosen.getAll("metric").forEach((name) => search.toggle(name));
  search.list();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw(search));
  // Charts that were never in sight are drawn for paper, too.
  addEventListener("beforeprint", () => charts.forEach((chart) => chart.plot || chart.draw()));
  for (const kind of ["pointermove", "keydown", "wheel"]) {
    addEventListener(kind, () => {
      lastTouched = Date.now();
    }, { passive: true });
  }
}

makePage();
// For who drives a browser: the page is there.
document.documentElement.dataset.shown = "yes";
