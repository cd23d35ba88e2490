// What features tell beside a turn (features/shared/turn_notes.py): a line, and a table that is made
// when one opens it, as there may be hundreds of rows at every turn.
"use strict";

{
  // Rows of a table that are shown at once.
  const MOST_ROWS = 50;

  // The notes on a turn of an episode, its number counted from 0 on.
  viewer.turnNotes = function (episode, turn) {
    episode.notesOfTurn ||= Map.groupBy(episode.notes || [], (note) => note.turn);
    return (episode.notesOfTurn.get(turn) || []).map(noteView);
  };

  function noteView(note) {
    const content = element("div", { class: "note-content" });
    const view = element("details", { class: "turn-note" },
      element("summary", {}, element("strong", {}, viewer.visible(note.title)), " ",
        viewer.visible(note.line)),
      content);
    view.addEventListener("toggle", () => {
      if (view.open && !content.firstChild) fill(content, note);
    });
    return view;
  }

  function fill(content, note) {
    const body = element("tbody", {});
    const head = note.columns.map(([name, sentence]) =>
      element("th", { scope: "col", title: sentence }, name));
    const table = element("table", {}, element("thead", {}, element("tr", {}, head)), body);
    const more = element("button", { type: "button" });
    let shown = 0;
    const add = () => {
      const next = note.rows.slice(shown, shown + MOST_ROWS);
      appendParts(body, next.map((row) => rowView(row, note.columns)));
      shown += next.length;
      more.textContent = `… ${thousands(note.rows.length - shown)} more`;
      more.hidden = shown >= note.rows.length;
    };
    more.addEventListener("click", add);
    add();
    viewer.replace(content, note.rows.length ? table : null, more,
      note.remark ? element("p", { class: "hint" }, viewer.visible(note.remark)) : null);
  }

  // A cell says its column's name, too, where the table has become a list.
  function rowView(row, columns) {
    return element("tr", {}, row.map((cell, number) => {
      const name = columns[number][0];
      if (typeof cell === "number") {
        return element("td", { class: "number", "data-name": name, title: viewer.short(cell, 6) },
          viewer.short(cell, 3));
      }
      return element("td", { class: cell ? "words" : "words nothing", "data-name": name },
        viewer.visible(cell));
    }));
  }
}
