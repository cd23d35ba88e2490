// What stands beside an episode's conversation: its facts, its rows as a tree, and the command
// that plays it again.
"use strict";

{
  // Texts that stand in a line.
  const SHORT_TEXT = 60;

  viewer.factsView = function (episode) {
    const rows = Object.entries(episode.facts).filter(([, value]) => !isNothing(value));
    return element("details", { class: "facts" },
      element("summary", {}, "All that was recorded of it"),
      element("table", {}, element("tbody", {}, rows.map(([name, value]) =>
        element("tr", {},
          element("th", { scope: "row" }, viewer.plainText(name)),
          element("td", {}, viewer.visible(asText(value))))))));
  };

  const isNothing = (value) => value === null || value === "" || JSON.stringify(value) === "{}";
  const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));

  // How a program ended, and the ends of what it wrote.
  viewer.programView = function (episode) {
    if (!episode.program.length) return null;
    return element("section", { class: "program", "aria-label": "Program" },
      element("h2", {}, "Program"),
      episode.program.map(([name, text]) => (text.includes("\n") || text.length > SHORT_TEXT
        ? element("details", { open: name === "errors" },
          element("summary", {}, nameOf(name)), element("pre", {}, viewer.visible(text)))
        : element("p", {}, `${nameOf(name)}: `, viewer.visible(text)))));
  };

  const nameOf = (name) => viewer.plainText(name).replaceAll("_", " ");

  // Rows: each under the one that it begins with.
  viewer.treeView = function (episode, chosen, choose) {
    if (episode.rows.length < 2) return null;
    const children = new Map();
    episode.rows.forEach((row, number) => {
      const parent = row.parent && row.parent.row < number ? row.parent.row : -1;
      if (!children.has(parent)) children.set(parent, []);
      children.get(parent).push(number);
    });
    const branch = (parent) => {
      const numbers = children.get(parent) || [];
      if (!numbers.length) return null;
      return element("ul", {}, numbers.map((number) =>
        element("li", {}, node(episode, number, chosen === number, choose), branch(number))));
    };
    return element("section", { class: "tree", "aria-label": "Rows" },
      element("h2", {}, plural(episode.rows.length, "row")),
      element("p", { class: "hint" }, children.size > 1
        ? "Each is one sequence; one that is set in begins with tokens of the row above it."
        : "Each is one sequence, and none begins with the tokens of another."),
      branch(-1));
  };

  function node(episode, number, isChosen, choose) {
    const row = episode.rows[number];
    const turns = [...new Set(row.columns.turn_ids)].filter((turn) => turn >= 0);
    const sampled = row.columns.sampled.reduce((sum, one) => sum + (one > 0), 0);
    const begins = row.parent ? `, begins with ${row.parent.tokens} tokens of row ${row.parent.row}`
      : "";
    const isWhole = turns.at(-1) - turns[0] === turns.length - 1;
    const told = turns.map((turn) => turn + 1);
    const listed = isWhole && told.length > 1 ? `${told[0]}–${told.at(-1)}` : told.join(", ");
    const what = turns.length ? `turn${turns.length > 1 ? "s" : ""} ${listed}` : "no turn";
    const text = `row ${number}: ${what}, ${row.columns.prompt_ids.length} + `
      + `${row.columns.response_ids.length} tokens, ${sampled} sampled${begins}${asideOf(row)}`;
    return element("button", { type: "button", class: "node", "aria-pressed": String(isChosen),
      onclick: () => choose(number) }, text, rewriting(episode, row));
  }

  // Whether the environment asked for a row, and whose own reward it earns.
  function asideOf(row) {
    if (typeof row.aside !== "string") return "";
    const own = row.aside ? `, with a reward of its own as ${viewer.plainText(row.aside)}` : "";
    return `, asked for by the environment${own}`;
  }

  // Whether turns are a program's requests; what was written for a new context was asked for, too.
  viewer.isProgram = (episode) => episode.turns.some((turn) => turn.asked && !turn.facts.writes);

  // Tokens of both sides that a rewriting is told by.
  const TOLD = 6;

  // What a row says where the row above it says something else: its history was rewritten, or a
  // program went on from there twice.
  function rewriting(episode, row) {
    const above = row.parent && episode.rows[row.parent.row];
    if (!above) return null;
    const start = row.parent.tokens;
    const had = textFrom(episode, above, start);
    if (had === "") return null;
    const isProgram = viewer.isProgram(episode);
    const why = row.seam ? ", as a new context begins." : ", as where a chat template drops what was said.";
    return element("span", { class: "rewriting" },
      isProgram ? "The program sent another history: " : "Its history was rewritten: ",
      `behind these tokens row ${row.parent.row} has `,
      element("q", {}, viewer.visible(had)), ", this one ",
      element("q", {}, viewer.visible(textFrom(episode, row, start))),
      isProgram ? "." : why);
  }

  // The text of some tokens of a row, prompt and response in one.
  function textFrom(episode, row, start) {
    const prompt = row.columns.prompt_ids.length;
    const end = Math.min(start + TOLD, prompt + row.columns.response_ids.length);
    let text = "";
    for (let k = start; k < end; k += 1) {
      const inPrompt = k < prompt;
      text += viewer.tokenText(episode, row, inPrompt ? k : k - prompt, inPrompt);
    }
    return text;
  }

  // The command that plays the episode again up to a turn.
  viewer.playAgain = function (episode) {
    const { table } = viewer;
    const run = table.manifest.runs[table.run[episode.place]];
    const prefix = table.val[episode.place] ? "val-" : "";
    const file = `${run.episodes}/${prefix}${table.step[episode.place]}.jsonl`;
    const turns = episode.turns.length;
    const select = element("select", { "aria-label": "from which turn on" },
      Array.from({ length: turns }, (_, k) => element("option", { value: k + 1 }, `from turn ${k + 1} on`)));
    const code = element("code", {});
    const copy = element("button", { type: "button" }, "Copy");
    const words = () => ["python", "scripts/replay.py", run.folder, file, "--episode", episode.id]
      .concat(turns ? ["--until-turn", select.value] : []);
    const fill = () => (code.textContent = commandOf(words()));
    select.addEventListener("change", fill);
    copy.addEventListener("click", () => copyText(code, copy));
    viewer.chooseTurn = (turn) => {
      if (turn < 0 || turn >= turns) return;
      select.value = String(turn + 1);
      fill();
    };
    if (turns) select.value = String(turns);
    fill();
    return element("section", { class: "again", "aria-label": "Play again" },
      element("h2", {}, "Play again"),
      element("p", { class: "hint" }, "The turns before it as they were recorded; from it on a model plays."),
      element("div", { class: "row" }, turns ? select : null, copy), element("pre", {}, code));
  };

  // Words as a shell takes them. What would not be seen is not put into a command.
  function commandOf(words) {
    if (words.some((word) => viewer.plainText(word) !== word || /[\t\n]/.test(word))) {
      return "# its id or its folder holds characters that cannot be seen: give them by hand";
    }
    return words.map((word) => {
      if (/^[\w@%+=:,./-]+$/.test(word)) return word;
      return `'${word.replaceAll("'", "'\\''")}'`;
    }).join(" ");
  }

  async function copyText(code, button) {
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      // A page from the disk may not be allowed to: the text is selected, to be copied by hand.
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      button.textContent = "Selected: press Ctrl+C";
      return;
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }
}
