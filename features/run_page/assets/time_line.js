// Draws over the run's steps what happened to it: processes, settings, checkpoints, alarms.

const EVENT_ROWS = [
  ["process", ["start", "resume", "restart", "end"]],
  ["settings", ["settings"]],
  ["checkpoints", ["checkpoint"]],
  ["validation", ["validation"]],
];
const TICKS = 6;

function timeLine(run) {
  const last = Math.max(run.lastStep, 1);
  const rows = [];
  for (const [label, kinds] of EVENT_ROWS) {
    const events = run.events.filter((event) => kinds.includes(event.kind));
    if (events.length) {
      rows.push(timeRow(label, events.map((event) => eventMark(event, last)), ""));
    }
  }
  for (const [name, spans] of Object.entries(run.spans)) {
    rows.push(timeRow(name, spans.map((span) => spanMark(name, span, last)), "alarm"));
  }
  if (!rows.length) {
    return null;
  }
  return element("div", { class: "timeline" }, [...rows, timeAxis(last)]);
}

function timeRow(label, marks, kind) {
  return element("div", { class: `row ${kind}` }, [
    element("span", { class: "label", title: label }, [label]),
    element("div", { class: "track" }, marks),
  ]);
}

function eventMark(event, last) {
  const words = [event.kind, `step ${event.step}`, formatTime(event.time), event.text];
  const mark = element("i", {
    class: `mark ${event.kind}`,
    title: words.filter((word) => word).join(" · "),
  });
  mark.style.left = `${(100 * event.step) / last}%`;
  return mark;
}

function spanMark(name, [first, end], last) {
  const title = first === end ? `${name}: step ${first}` : `${name}: steps ${first} to ${end}`;
  const mark = element("i", { class: "mark span", title });
  mark.style.left = `${(100 * first) / last}%`;
  mark.style.width = `${(100 * (end - first)) / last}%`;
  return mark;
}

// Round steps, and the last one; what would stand too near to that is left out.
function stepsOfAxis(last) {
  const least = last / TICKS;
  const unit = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  const stride = [1, 2, 5, 10].map((times) => times * unit).find((size) => size >= least);
  const steps = [];
  for (let step = 0; step < last - stride / 2; step += stride) {
    steps.push(step);
  }
  return [...steps, last];
}

function timeAxis(last) {
  const ticks = stepsOfAxis(last).map((step) => {
    const tick = element("span", {}, [String(step)]);
    tick.style.left = `${(100 * step) / last}%`;
    return tick;
  });
  return element("div", { class: "row axis" }, [
    element("span", { class: "label" }, ["step"]),
    element("div", { class: "track" }, ticks),
  ]);
}
