// Makes the page's tables of alarms, step times, settings and differences.

// Names what an alarm's link leads to; without an order the list has nothing of the alarm's own.
function wordsOfView(view) {
  if (view.startsWith("episode/")) {
    return "the tokens that rang it";
  }
  if (view.startsWith("group/")) {
    return "the group that rang it";
  }
  if (view.includes("sort=-seconds")) {
    return "the step's slowest episodes";
  }
  return view.includes("sort=") ? "the episodes that rang it" : "the step's episodes";
}

// What names its cause stands first, then the latest; those of one step as they were told.
function inOrder(alarms) {
  return [...alarms].sort((a, b) => b.first - a.first || b.step - a.step);
}

// The list of alarms, with the way to what rang each.
function alarmTable(run) {
  const rows = inOrder(run.alarms).map((alarm) => [
    element("span", { class: "when" }, [formatTime(alarm.time)]),
    element("span", { class: "when" }, [stepsRung(alarm)]),
    code(alarm.name),
    alarmText(alarm),
    viewerLink(run, alarm.view, alarm.view && wordsOfView(alarm.view)),
  ]);
  const parts = [
    ...viewerHint(run),
    table(["began", "steps", "alarm", "what it says", "look"], rows),
  ];
  if (run.alarmsLeftOut) {
    parts.push(element("p", {}, [`${run.alarmsLeftOut} earlier ones are left out.`]));
  }
  return element("div", { class: "alarms" }, parts);
}

function stepsRung(alarm) {
  return alarm.last > alarm.step ? `${alarm.step} – ${alarm.last}` : String(alarm.step);
}

function alarmText(alarm) {
  const parts = [element("div", {}, [alarm.text])];
  if (alarm.meaning) {
    const words = ["It means: ", prose(alarm.meaning), ". "];
    if (CONTENT.alarmDocs) {
      const href = `${CONTENT.alarmDocs}#:~:text=${encodeURIComponent(alarm.name)}`;
      words.push(element("a", { href }, ["features/alarms/README.md"]));
    }
    parts.push(element("div", { class: "aside" }, words));
  }
  return element("div", {}, parts);
}

// A link into the viewer of the run's episodes; words alone until there is one.
function viewerLink(run, view, words) {
  if (!view || !run.viewer.isThere) {
    return view ? words : "";
  }
  return element("a", { href: `${run.viewer.href}#${view}` }, [words]);
}

// The viewer that points of curves lead into: that of one run which has recorded episodes.
function viewerOfCharts() {
  const [{ viewer }, ...others] = CONTENT.runs;
  return !others.length && (viewer.isThere || viewer.hasEpisodes) ? viewer : null;
}

// What makes the viewer, where it is not there.
function viewerHint(run) {
  if (run.viewer.isThere) {
    return [];
  }
  const words =
    "These become links into the viewer of the run's episodes, which this command makes: ";
  const after = " (then load this page again)";
  return [element("p", { class: "aside" }, [words, code(run.viewer.command), after])];
}

// Ways into the episodes, each with how much there is to see.
function episodeLinks(run) {
  const links = run.looks.map(({ words, note, view }) =>
    element("li", {}, [
      viewerLink(run, view, words),
      note ? element("small", {}, [` ${note}`]) : "",
    ]),
  );
  return element("div", {}, [...viewerHint(run), element("ul", { class: "ways" }, links)]);
}

function stepTimeTable(run) {
  const { steps, columns } = run.stepTimes;
  const names = Object.keys(columns);
  const rows = steps.map((step, place) => [
    step,
    ...names.map((name) => columns[name][place]),
  ]);
  return table(["step", ...names.map((name) => `${name}, s`)], rows.reverse());
}

// A table that another feature has written for the page.
function ownTable({ headings, rows, note }) {
  const parts = [table(headings, rows)];
  if (note) {
    parts.push(element("p", {}, [note]));
  }
  return element("div", {}, parts);
}

function changesTable(run) {
  const rows = [];
  for (const change of run.changes) {
    for (const { key, before, after } of change.changed) {
      rows.push([`after ${change.step}`, code(key), code(before), code(after)]);
    }
  }
  return table(["step", "setting", "before", "since then"], rows);
}

function settingsTable(run) {
  return table(
    ["setting", "value", "default", "what it is"],
    run.settings.map((row) => [code(row.key), code(row.value), code(row.default), row.doc]),
  );
}

function differencesTable() {
  const { groups, rows } = CONTENT.differences;
  return table(
    ["setting", ...groups],
    rows.map((row) => [code(row.key), ...row.values.map(code)]),
  );
}

function code(text) {
  return element("code", {}, [text]);
}
