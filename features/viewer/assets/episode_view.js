// One episode: its conversation with coloured tokens, a token's card, and beside them how it was
// rewarded and trained on.
"use strict";

{
  let shown = null;

  // How a program's turn ended of which nothing is trained on.
  const UNTAKEN = {
    gone: "given up: the client hung up",
    undelivered: "taken out: nobody took the answer",
    engine: "refused by the engine",
  };

  viewer.views.episode = async function (main, address) {
    const i = viewer.table.places.get(address.parts.slice(0, 4).join("/"));
    if (i === undefined) return missing(main);
    const episode = await viewer.loadEpisode(i);
    if (viewer.parseAddress(location.hash).parts.join("/") !== address.parts.join("/")) return;
    viewer.listAll();
    shown = stateOf(episode, address.values);
    document.title = `Step ${viewer.table.step[i]}: ${viewer.plainText(episode.id)}`;
    draw(main);
  };

  function missing(main) {
    viewer.replace(main, element("section", { class: "fault" },
      element("h2", {}, "This episode is not in the viewer."),
      viewer.table.manifest.goes_on ? element("p", {}, "The run goes on, and this viewer is made "
        + "again meanwhile: later steps come. Load the page again.") : null,
      element("p", {}, "Its record was thinned out, or could not be read; the notes at the top "
        + "of the page say which lines were damaged. "),
      element("a", { href: "#list" }, "All episodes")));
  }

  function stateOf(episode, values) {
    const measures = viewer.measuresOf(episode.rows);
    const measure = measures.find((one) => one.name === values.color) || null;
    const state = { episode, measures, measure, values, numbers: values.numbers === "1" };
    state.mode = values.row === undefined || values.as === "talk" ? "talk" : `row ${values.row}`;
    state.scale = measure && viewer.scaleOf(measure, episode.rows);
    const [row, i] = [Number(values.row || 0), Number(values.token)];
    const isThere = episode.rows[row]?.columns.response_ids.length > i;
    state.token = values.token !== undefined && isThere && i >= 0 ? { row, i } : null;
    if (!episode.rows[row]) state.mode = "talk";
    return state;
  }

  function draw(main) {
    const { episode } = shown;
    const talk = element("div", { class: "talk" });
    // Within the bar that stays in sight.
    const legend = element("div", { class: "legend-place" });
    const card = element("div", { class: "card-place", "aria-live": "polite" });
    const tree = element("div", {});
    shown.parts = { talk, legend, card, tree };
    const side = element("aside", { class: "side", "aria-label": "About the episode" },
      card, tree, viewer.pathView(episode), viewer.programView(episode), viewer.playAgain(episode),
      viewer.factsView(episode));
    viewer.replace(main,
      element("article", { class: "episode" }, head(episode),
        element("div", { class: "episode-columns" },
          element("div", { class: "episode-main" }, controls(legend), talk), side)));
    talk.addEventListener("click", (event) => clickToken(event));
    drawTalk();
    drawLegend();
    drawCard();
    viewer.closeCard = closeCard;
    if (shown.token) scrollToToken();
    else if (!scrollToTurn(shown.values.turn)) window.scrollTo(0, 0);
  }

  function head(episode) {
    const { table } = viewer;
    const i = episode.place;
    const kind = table.val[i] ? "validation" : "step";
    const step = viewer.listAddress({ step: table.step[i], kind: table.val[i] ? "val" : "train" });
    const rows = viewer.listed.rows;
    const place = rows.indexOf(i);
    const others = othersOf(i);
    const facts = [
      ["reward", viewer.short(table.reward[i])], ["ending", viewer.textOf("ending", i) || "–"],
      ["turns", table.turns[i]], ["tokens", table.tokens[i]],
    ];
    if (!Number.isNaN(table.seconds[i])) facts.push(["seconds", told(table.seconds[i], i)]);
    if (table.attempts[i] > 1) facts.push(["played", `${table.attempts[i]} times`]);
    if (table.rows[i] > 1) facts.push(["rows", table.rows[i]]);
    if (table.no_spread[i]) facts.push(["group", "without spread"]);
    if (table.stale[i]) facts.push(["weights", "older than the step's"]);
    if (table.empty[i]) facts.push(["answers", "empty"]);
    return element("header", { class: "episode-head" },
      element("nav", { "aria-label": "Place" },
        element("a", { href: viewer.listAddress(viewer.listed.values) }, "List"), " › ",
        element("a", { href: step }, `${kind} ${table.step[i]}`),
        others.group ? [" › ", element("a", { href: viewer.groupAddress(i) }, "group")] : null,
        others.task
          ? [" › ", element("a", { href: viewer.taskAddress(i) }, "same task")] : null,
        element("span", { class: "turning" },
          element("button", { type: "button", onclick: () => viewer.moveEpisode(-1),
            disabled: place <= 0, title: "←" }, "← Previous"),
          place >= 0 ? ` ${thousands(place + 1)} of ${thousands(rows.length)} ` : " ",
          element("button", { type: "button", onclick: () => viewer.moveEpisode(1),
            disabled: place >= rows.length - 1, title: "→" }, "Next →"))),
      element("h1", { title: viewer.plainText(episode.id) }, "Episode ",
        viewer.visible(episode.id)),
      element("dl", { class: "chips" }, facts.map(([name, value]) =>
        element("div", { class: "fact" }, element("dt", {}, name),
          element("dd", {}, viewer.plainText(value))))),
      episode.faults.map((fault) => element("p", { class: "note" }, viewer.plainText(fault))));
  }

  // "12 (engine 8, environment 3)".
  function told(seconds, i) {
    const parts = [["engine", "engine_seconds"], ["environment", "env_seconds"]]
      .map(([what, name]) => [what, viewer.table[name][i]])
      .filter(([, value]) => value > 0)
      .map(([what, value]) => `${what} ${viewer.short(value, 2)}`);
    return viewer.short(seconds, 2) + (parts.length ? ` (${parts.join(", ")})` : "");
  }

  // Whether there are other episodes of its group, and of its task: else a page of them is empty.
  function othersOf(i) {
    const { table } = viewer;
    const found = { group: false, task: false };
    for (const k of table.order) {
      if (k === i) continue;
      const isBeside = table.run[k] === table.run[i] && table.step[k] === table.step[i]
        && table.val[k] === table.val[i];
      if (isBeside && table.uid[k] === table.uid[i]) found.group = true;
      if (table.task[k] === table.task[i]) found.task = true;
    }
    return found;
  }

  function controls(legend) {
    const colour = element("select", { id: "color" },
      element("option", { value: "" }, "nothing"),
      shown.measures.map((one) => element("option", { value: one.name }, one.label)));
    colour.value = shown.measure ? shown.measure.name : "";
    colour.addEventListener("change", () => setMeasure(colour.value));
    const numbers = element("input", { type: "checkbox", id: "numbers", checked: shown.numbers });
    numbers.addEventListener("change", () => {
      shown.numbers = numbers.checked;
      viewer.repaint(shown, shown.parts.talk);
      remember();
    });
    const modes = ["talk", ...shown.episode.rows.map((_, number) => `row ${number}`)];
    const mode = element("select", { id: "mode" }, modes.map((name) =>
      element("option", { value: name }, name === "talk" ? "conversation" : `tokens of ${name}`)));
    mode.value = shown.mode;
    mode.addEventListener("change", () => setMode(mode.value));
    shown.modeSelect = mode;
    return element("div", { class: "controls" },
      element("label", {}, "Show ", mode),
      element("label", {}, "Colour tokens by ", colour),
      element("label", {}, numbers, " with numbers"), legend);
  }

  function setMeasure(name) {
    shown.measure = shown.measures.find((one) => one.name === name) || null;
    shown.scale = shown.measure && viewer.scaleOf(shown.measure, shown.episode.rows);
    viewer.repaint(shown, shown.parts.talk);
    drawLegend();
    remember();
  }

  function setMode(mode) {
    shown.mode = mode;
    shown.modeSelect.value = mode;
    drawTalk();
    drawTree();
    remember();
  }

  // Puts what is shown into the address, so that it can be given to somebody.
  function remember() {
    const values = {
      row: shown.token ? shown.token.row : shown.mode === "talk" ? "" : shown.mode.slice(4),
      token: shown.token ? shown.token.i : "",
      color: shown.measure ? shown.measure.name : "",
      numbers: shown.numbers ? "1" : "",
      as: shown.token && shown.mode === "talk" ? "talk" : "",
    };
    viewer.replaceAddress(viewer.episodeAddress(shown.episode.place, values));
  }

  function drawLegend() {
    viewer.replace(shown.parts.legend, shown.measure
      ? viewer.legend(shown.measure, shown.scale, (value) => nextOf(value, 1)) : null);
    drawTree();
  }

  function drawTree() {
    viewer.replace(shown.parts.tree, viewer.treeView(shown.episode,
      shown.mode === "talk" ? -1 : Number(shown.mode.slice(4)), (row) => setMode(`row ${row}`)));
  }

  function drawTalk() {
    const parts = shown.mode === "talk" ? conversation() : wholeRow(Number(shown.mode.slice(4)));
    viewer.replace(shown.parts.talk, parts);
  }

  function conversation() {
    const { episode } = shown;
    // The error of an attempt that was played again stands with that attempt.
    const isOfAttempt = episode.failed_attempts.some(({ error }) => error === episode.error);
    const isProgram = viewer.isProgram(episode);
    const begins = isProgram ? [] : episode.messages;
    return [
      episode.failed_attempts.map(failedAttempt),
      begins.map(([role, text]) => bubble(role || "message", viewer.block(text), "env")),
      turnViews(episode.turns),
      episode.error && !isOfAttempt ? bubble("error", viewer.block(episode.error), "error") : null,
      episode.turns.length ? null : element("p", { class: "hint" }, "The policy said nothing."),
    ];
  }

  // The turns in order; what the environment asked the policy stands before what it then answered.
  function turnViews(turns) {
    const views = [];
    let answers = null;
    turns.forEach((turn, number) => {
      if (!turn.facts.aside) {
        views.push(answers);
        answers = (turn.asked ? [] : turn.observation)
          .map(([role, text]) => bubble(role || "environment", viewer.block(text), "env"));
      }
      views.push(turnView(turn, number));
    });
    return [...views, answers];
  }

  function turnView(turn, number) {
    const found = tokensOfTurn(number);
    const said = found ? saidInTokens(found) : saidInText(turn.text);
    const label = element("span", {}, `policy, turn ${number + 1}`, turnFacts(turn.facts));
    const parts = [
      seam(found, number),
      turn.asked ? asked(turn, number) : null,
      bubble(label, said, "policy", number + 1),
      calls(turn.facts.tool_calls),
      viewer.turnNotes(shown.episode, number),
    ];
    return turn.facts.aside ? element("section", { class: "aside-turn" }, parts) : parts;
  }

  // What was dropped where a new context begins with the turn.
  function seam(found, number) {
    const row = found && shown.episode.rows[found.row];
    if (!row?.seam || tokensOfTurn(number - 1)?.row === found.row) return null;
    const { reason, dropped, tokens, fault } = row.seam;
    const lost = `${dropped} message${dropped === 1 ? "" : "s"} of the one before, which had `
      + `${tokens} tokens, ${dropped === 1 ? "is" : "are"} not in it`;
    return element("p", { class: "hint branch seam" },
      `a new context begins (${viewer.plainText(String(reason)).replaceAll("_", " ")}): ${lost}`,
      fault ? element("span", { class: "rewriting" }, viewer.visible(`Without the summary: ${fault}.`)) : null);
  }

  // A turn's tokens, its thinking in folds of its own; a token belongs where it begins.
  function saidInTokens({ row, places }) {
    const texts = places.map((i) => viewer.tokenText(shown.episode, shown.episode.rows[row], i, false));
    let k = 0;
    let offset = 0;
    const parts = viewer.thinkingIn(texts.join("")).map(({ end, thinks }) => {
      const first = k;
      while (k < places.length && offset < end) {
        offset += texts[k].length;
        k += 1;
      }
      return { places: places.slice(first, k), thinks };
    });
    const rest = places.slice(k);
    if (rest.length) parts.push({ places: rest, thinks: false });
    const { token } = shown;
    return parts.map((part) => {
      const tokens = element("div", { class: "said" }, viewer.tokenSpans(shown, row, part.places));
      const isOpen = token?.row === row && part.places.includes(token.i);
      return part.thinks ? thinking(tokens, isOpen) : tokens;
    });
  }

  function saidInText(text) {
    if (!text) return element("span", { class: "hint" }, "(empty)");
    return viewer.thinkingIn(text).map(({ start, end, thinks }) => {
      const block = viewer.block(text.slice(start, end));
      return thinks ? thinking(block, false) : block;
    });
  }

  function thinking(contents, isOpen) {
    return element("details", { class: "thinking", open: isOpen },
      element("summary", {}, "thinking"), contents);
  }

  // What a program's request says that is new, and where it goes on unless that is the turn above.
  function asked(turn, number) {
    const isNext = turn.behind === number - 1;
    const begins = typeof turn.behind !== "number";
    const opens = turn.facts.aside ? "the environment asks" : "a conversation begins";
    const place = begins ? opens : `goes on behind turn ${turn.behind + 1}`;
    return [
      isNext || (begins && number === 0) ? null : element("p", { class: "hint branch" }, place),
      turn.asked.map(([role, text]) => bubble(role || "message", viewer.block(text), "env")),
    ];
  }

  function turnFacts(facts) {
    const shownFacts = [];
    if (facts.reward) shownFacts.push(`reward ${viewer.short(facts.reward)}`);
    if (facts.finish_reason === "length") shownFacts.push("cut: too long");
    const took = [["engine", facts.engine_seconds], ["environment", facts.env_seconds]]
      .filter(([, seconds]) => typeof seconds === "number" && seconds > 0);
    for (const [what, seconds] of took) shownFacts.push(`${what} ${viewer.short(seconds, 2)} s`);
    if (facts.done === true) shownFacts.push("the last");
    if (facts.aside) shownFacts.push(`the environment asked ${viewer.plainText(String(facts.writes))}`);
    else if (facts.writes) shownFacts.push(`writes a ${viewer.plainText(String(facts.writes))}`);
    if (facts.trained === false) shownFacts.push("not trained on");
    if (facts.replaces_history === true) shownFacts.push("its answer replaces the conversation");
    if (facts.finish_reason in UNTAKEN) shownFacts.push(UNTAKEN[facts.finish_reason]);
    return shownFacts.map((text) => element("span", { class: "tag" }, text));
  }

  function calls(list) {
    if (!Array.isArray(list)) return null;
    return list.map((call) => element("div", { class: "call" },
      element("span", { class: "tag" }, "tool"), " ", toldCall(call)));
  }

  // A call: its name, how it went, how long it took, and whatever else was recorded of it.
  function toldCall(call) {
    if (!call || typeof call !== "object" || typeof call.name !== "string") {
      return viewer.visible(typeof call === "string" ? call : JSON.stringify(call));
    }
    const { name, ok, error_kind: kind, seconds, ...others } = call;
    const parts = [element("strong", {}, viewer.visible(name)), " ", outcome(ok, kind)];
    if (typeof seconds === "number") parts.push(` ${viewer.short(seconds, 2)} s`);
    for (const [key, value] of Object.entries(others)) {
      if (value === null || value === "") continue;
      const text = typeof value === "string" ? value : JSON.stringify(value);
      parts.push(" ", element("span", { class: "of-call" }, viewer.plainText(key), ": ",
        viewer.visible(text)));
    }
    return parts;
  }

  function outcome(ok, kind) {
    if (ok === undefined) return null;
    if (ok !== false) return element("span", { class: "tag" }, "ok");
    const why = viewer.plainText(String(kind || "an error"));
    return element("span", { class: "tag m-failed" }, `failed: ${why}`);
  }

  function bubble(label, contents, kind, turn = null) {
    const name = typeof label === "string" ? viewer.plainText(label) : label;
    return element("section", { class: `bubble ${kind}`, "data-turn": turn },
      element("h3", {}, name), contents);
  }

  function failedAttempt(attempt, number) {
    const turns = attempt.turns.map((turn, k) => [
      bubble(`policy, turn ${k + 1}`, saidInText(turn.text), "policy"),
      turn.observation.map(([role, text]) => bubble(role, viewer.block(text), "env")),
    ]);
    return element("details", { class: "attempt" },
      element("summary", {}, `Attempt ${number} failed (${viewer.plainText(attempt.ending)}) and `
        + "was played again"),
      turns, attempt.error ? bubble("error", viewer.block(attempt.error), "error") : null);
  }

  // The row and places of a turn's sampled tokens, in the last row that has them.
  function tokensOfTurn(turn) {
    shown.turns ||= tokensOfTurns(shown.episode.rows);
    return shown.turns.get(turn) || null;
  }

  // Of every turn at once: an episode may have thousands, and as many tokens for each.
  function tokensOfTurns(rows) {
    const turns = new Map();
    rows.forEach(({ columns }, row) => {
      columns.turn_ids.forEach((turn, i) => {
        const found = turns.get(turn);
        if (found && found.row === row) found.places.push(i);
        else turns.set(turn, { row, places: [i] });
      });
    });
    return turns;
  }

  function wholeRow(number) {
    const row = shown.episode.rows[number];
    const places = Array.from(row.columns.response_ids.keys());
    return [
      element("details", { class: "prompt", open: row.columns.prompt_ids.length < 400 },
        element("summary", {}, `Prompt, ${plural(row.columns.prompt_ids.length, "token")}`),
        element("div", { class: "said" }, viewer.promptSpans(shown.episode, row))),
      element("div", { class: "said response" }, viewer.tokenSpans(shown, number, places)),
    ];
  }

  function clickToken(event) {
    const span = event.target.closest("span[data-i]");
    if (span) openToken(Number(span.dataset.row), Number(span.dataset.i));
  }

  function openToken(row, i) {
    shown.token = { row, i };
    viewer.repaint(shown, shown.parts.talk);
    drawCard();
    // The card is the first thing beside the conversation.
    shown.parts.card.parentElement.scrollTop = 0;
    remember();
    const turn = shown.episode.rows[row].columns.turn_ids[i];
    viewer.chooseTurn?.(turn);
  }

  function drawCard() {
    viewer.replace(shown.parts.card, shown.token ? viewer.card(shown, shown.token) : null);
  }

  // Closes the card; false where none is open.
  function closeCard() {
    if (!shown.token) return false;
    shown.token = null;
    viewer.repaint(shown, shown.parts.talk);
    drawCard();
    remember();
    return true;
  }

  const spanOf = ({ row, i }) =>
    shown.parts.talk.querySelector(`span[data-row="${row}"][data-i="${i}"]`);

  function scrollToToken() {
    if (!spanOf(shown.token)) setMode(`row ${shown.token.row}`);
    const span = spanOf(shown.token);
    span?.closest("details")?.setAttribute("open", "");
    span?.scrollIntoView({ block: "center" });
    span?.focus({ preventScroll: true });
  }

  // Goes to a turn, the first being 1; false where there is none of the kind.
  function scrollToTurn(turn) {
    if (!/^\d+$/.test(turn || "")) return false;
    const found = shown.parts.talk.querySelector(`.bubble[data-turn="${turn}"]`);
    found?.scrollIntoView({ block: "center" });
    return Boolean(found);
  }

  // The next episode of the list, or the one before.
  viewer.moveEpisode = function (by) {
    const rows = viewer.listed.rows;
    const place = rows.indexOf(shown.episode.place) + by;
    if (place < 0 || place >= rows.length || !rows.length) return;
    const values = { color: shown.measure?.name, numbers: shown.numbers ? "1" : "" };
    location.hash = viewer.episodeAddress(rows[place], values);
  };

  // The next token, or the one before, where a card is open.
  viewer.moveToken = function (by) {
    if (!shown?.token) return false;
    const spans = [...shown.parts.talk.querySelectorAll("span[data-i]")];
    const next = spans[spans.indexOf(spanOf(shown.token)) + by];
    if (next) openSpan(next);
    return true;
  };

  function openSpan(span) {
    openToken(Number(span.dataset.row), Number(span.dataset.i));
    span.closest("details")?.setAttribute("open", "");
    span.scrollIntoView({ block: "nearest" });
    span.focus({ preventScroll: true });
  }

  // The next token of a category, from the open one on and around.
  function nextOf(value, by) {
    if (!shown.measure) return;
    const spans = [...shown.parts.talk.querySelectorAll("span[data-i]")];
    const start = shown.token ? spans.indexOf(spanOf(shown.token)) : by > 0 ? -1 : 0;
    for (let k = 1; k <= spans.length; k += 1) {
      const span = spans[(start + by * k + spans.length * 2) % spans.length];
      const row = shown.episode.rows[Number(span.dataset.row)];
      if (viewer.valueOf(shown.measure, row, Number(span.dataset.i)) === value) {
        openSpan(span);
        return;
      }
    }
  }

  viewer.moveAlike = function (by) {
    if (!shown?.token || shown.measure?.kind !== "category") return;
    const row = shown.episode.rows[shown.token.row];
    nextOf(viewer.valueOf(shown.measure, row, shown.token.i), by);
  };
}
