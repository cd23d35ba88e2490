// The members of a group beside each other, from the first turn on in which they differ.
"use strict";

{
  // So many are put beside each other at first.
  const MOST_BESIDE = 16;
  // So many columns fit a usual window.
  const FIT_BESIDE = 5;

  viewer.views.group = async function (main, { parts }) {
    const [run, kind, step, uid] = parts;
    const rows = membersOf(Number(run), kind, Number(step), uid);
    document.title = `Step ${step}: a group`;
    if (!rows.length) {
      viewer.replace(main, element("section", { class: "fault" },
        element("h2", {}, "No episode of this group is in the viewer."),
        element("a", { href: "#list" }, "All episodes")));
      return;
    }
    const list = viewer.listAddress({ step, kind, group: uid, run });
    const beside = await viewer.besideEachOther(rows.slice(0, MOST_BESIDE));
    const more = rows.length > MOST_BESIDE
      ? element("p", { class: "hint" },
        `The first ${MOST_BESIDE} of ${rows.length}; `, element("a", { href: list }, "all"))
      : null;
    viewer.replace(main, element("article", { class: "group" },
      element("nav", { "aria-label": "Place" },
        element("a", { href: viewer.listAddress(viewer.listed.values) }, "List"), " › ",
        element("a", { href: viewer.listAddress({ step, kind, run }) },
          `${kind === "val" ? "validation" : "step"} ${step}`), " › ",
        element("a", { href: viewer.taskAddress(rows[0]) }, "same task")),
      element("h1", {}, `A group of ${plural(rows.length, "episode")} `,
        element("span", { class: "hint" }, viewer.visible(uid))),
      element("p", {}, rewardsOf(rows)),
      more, beside));
  };

  // An estimator that looks beyond the group may give advantages where it has no spread.
  function rewardsOf(rows) {
    const { table } = viewer;
    const rewards = rows.map((i) => table.reward[i]);
    const [least, most] = [Math.min(...rewards), Math.max(...rewards)];
    const spread = viewer.short(most - least);
    if (spread !== "0") {
      return `Rewards from ${viewer.short(least)} to ${viewer.short(most)}, a range of ${spread}.`;
    }
    const isNothing = rows.every((i) => table.advantage[i] === 0);
    const [alike, nothing] = rows.length === 1
      ? [`A reward of ${viewer.short(least)}`, "its advantage is 0"]
      : [`Rewards of ${viewer.short(least)}, no spread`, "their advantages are 0"];
    return isNothing ? `${alike}: ${nothing}.` : `${alike}.`;
  }

  function membersOf(run, kind, step, uid) {
    const { table } = viewer;
    const rows = [];
    for (const i of table.order) {
      if (table.run[i] !== run || table.step[i] !== step) continue;
      if ((kind === "val") !== (table.val[i] === 1)) continue;
      if (viewer.textOf("uid", i).toWellFormed() === uid) rows.push(i);
    }
    return rows;
  }

  // Episodes as columns. What all have in common stands once, above them.
  viewer.besideEachOther = async function (rows) {
    const episodes = [];
    for (const i of rows) episodes.push(await viewer.loadEpisode(i));
    const first = firstDifference(episodes);
    const most = Math.max(...episodes.map((episode) => episode.turns.length));
    const grid = element("div", { class: "beside" });
    grid.style.setProperty("--members", episodes.length);
    for (const episode of episodes) grid.append(memberHead(episode));
    for (let turn = first.turn; turn < most; turn += 1) {
      for (const episode of episodes) grid.append(cell(episode, turn));
    }
    return element("div", {}, common(episodes, first),
      episodes.length > FIT_BESIDE ? element("p", { class: "hint" },
        `${episodes.length} episodes beside each other: scroll sideways to see all.`) : null,
      element("div", { class: "beside-scroll", tabindex: "0" }, grid));
  };

  // The first turn in which two members differ; -1: before the first turn.
  function firstDifference(episodes) {
    const start = JSON.stringify(episodes[0].messages);
    if (episodes.some((one) => JSON.stringify(one.messages) !== start)) return { turn: 0, start: true };
    const least = Math.min(...episodes.map((one) => one.turns.length));
    for (let turn = 0; turn < least; turn += 1) {
      const said = JSON.stringify([episodes[0].turns[turn].text, episodes[0].turns[turn].observation]);
      const differs = episodes.some((one) =>
        JSON.stringify([one.turns[turn].text, one.turns[turn].observation]) !== said);
      if (differs) return { turn, start: false };
    }
    return { turn: least, start: false };
  }

  function common(episodes, first) {
    if (first.start) {
      return element("p", { class: "note" }, "Their first messages differ.");
    }
    const [episode] = episodes;
    const parts = episode.messages.map(([role, text]) => bubble(role, text, "env"));
    for (let turn = 0; turn < first.turn; turn += 1) {
      parts.push(bubble(`policy, turn ${turn + 1}`, episode.turns[turn].text, "policy"));
      for (const [role, text] of episode.turns[turn].observation) parts.push(bubble(role, text, "env"));
    }
    const what = first.turn
      ? `The same in all of them: the beginning and ${plural(first.turn, "turn")}`
      : "The same in all of them: the beginning";
    return element("details", { class: "common", open: true },
      element("summary", {}, what), parts);
  }

  function bubble(label, text, kind) {
    return element("section", { class: `bubble ${kind}` },
      element("h3", {}, viewer.plainText(label || "message")), viewer.block(text, "", 4000));
  }

  function memberHead(episode) {
    const { table } = viewer;
    const i = episode.place;
    const advantage = table.advantage[i];
    return element("header", { class: "member" },
      element("a", { href: viewer.episodeAddress(i) }, viewer.visible(episode.id)),
      element("dl", { class: "chips" },
        fact("reward", viewer.short(table.reward[i])),
        Number.isNaN(advantage) ? null : fact("advantage", viewer.short(advantage)),
        fact("ending", viewer.plainText(viewer.textOf("ending", i) || "–")),
        fact("step", `${table.val[i] ? "val " : ""}${table.step[i]}`),
        table.manifest.runs.length > 1 ? fact("run", table.run[i]) : null));
  }

  const fact = (name, value) => element("div", { class: "fact" },
    element("dt", {}, name), element("dd", {}, String(value)));

  function cell(episode, turn) {
    const found = episode.turns[turn];
    if (!found) {
      return element("div", { class: "turn-cell ended" },
        turn === episode.turns.length ? "ended" : "");
    }
    const reward = found.facts.reward ? `, reward ${viewer.short(found.facts.reward)}` : "";
    return element("div", { class: "turn-cell" },
      bubble(`turn ${turn + 1}${reward}`, found.text || "(empty)", "policy"),
      found.observation.map(([role, text]) => bubble(role, text, "env")));
  }
}
