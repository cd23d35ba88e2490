// Makes the head of the page: what run this is, how it stands, its numbers.

function runHead(run) {
  const facts = [`step ${run.lastStep}${run.totalSteps ? ` of ${run.totalSteps}` : ""}`];
  if (run.began !== null) {
    facts.push(`began ${formatTime(run.began)}`);
    const end = run.isRunning ? CONTENT.written : run.began + run.seconds;
    facts.push(`${formatDuration(end - run.began)} long`);
  }
  const badge = element("span", { class: `badge ${run.status}` }, [run.status]);
  const lines = [
    element("div", { class: "standing" }, [badge, element("span", {}, [facts.join(" · ")])]),
    element("p", { class: "line" }, [run.statusLine]),
  ];
  if (run.command) {
    lines.push(commandOf(run));
  }
  return element("div", { class: "run" }, lines);
}

function commandOf(run) {
  const versions = Object.entries(run.versions).map(([name, version]) => `${name} ${version}`);
  return element("details", {}, [
    element("summary", {}, ["command and versions"]),
    element("pre", {}, [run.command]),
    element("p", {}, [versions.join(" · ")]),
    element("p", {}, ["folder ", element("code", {}, [run.path])]),
  ]);
}

function summaryTiles(run) {
  const first = run.tiles.map((tile) => element("div", { class: "tile first" }, [
    element("div", { class: "value" }, [
      tile.seconds === null ? formatNumber(tile.value) : formatDuration(tile.seconds),
    ]),
    element("div", {}, [tile.label]),
    element("small", {}, [tile.note]),
  ]));
  const tiles = run.summary.map((row) => {
    const steps = row.steps > 1 ? `last ${row.steps} steps` : "last step";
    const before = row.first === null ? "" : `, first ${formatNumber(row.first)}`;
    return element("div", { class: "tile" }, [
      element("div", { class: "value" }, [formatNumber(row.last)]),
      element("div", {}, [row.label]),
      element("small", {}, [steps + before]),
    ]);
  });
  const alarms = run.alarms.length + run.alarmsLeftOut;
  tiles.push(element("a", { class: `tile ${alarms ? "bad" : ""}`, href: "#alarms" }, [
    element("div", { class: "value" }, [String(alarms)]),
    element("div", {}, [alarms === 1 ? "alarm" : "alarms"]),
    element("small", {}, [alarms ? "rang in the run" : "none rang"]),
  ]));
  return element("div", { class: "tiles" }, [...first, ...tiles]);
}

// The table of several runs: how each stands, in one line.
function runsTable() {
  const rows = CONTENT.groups.flatMap((group) => group.runs.map((number) => {
    const run = CONTENT.runs[number];
    const reward = run.summary.find((row) => row.metric === "critic/score/mean");
    return [
      group.name,
      element("span", { title: run.path }, [run.name]),
      element("span", { class: `badge ${run.status}`, title: run.statusLine }, [run.status]),
      run.lastStep,
      reward ? reward.last : null,
      run.alarms.length + run.alarmsLeftOut,
    ];
  }));
  return table(["line", "run", "status", "step", "reward at its end", "alarms"], rows);
}

// Says when the page was written, and that it has not been for too long.
function writtenLine() {
  const age = Date.now() / 1000 - CONTENT.written;
  const line = element("p", { class: "written" }, [`written ${formatTime(CONTENT.written)}`]);
  const running = CONTENT.runs.filter((run) => run.isRunning);
  if (!running.length || !CONTENT.rewrittenEvery) {
    return line;
  }
  line.append(`, again about every ${formatDuration(CONTENT.rewrittenEvery)}`);
  if (age > 3 * CONTENT.rewrittenEvery + 60) {
    const words =
      `, but not for ${formatDuration(age)}: a long step, or the run ended without a word ` +
      "(python -m features.run_page.report tells)";
    line.append(element("strong", {}, [words]));
  }
  return line;
}
