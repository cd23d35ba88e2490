// Keys: arrows, / for the search, Escape to close, ? for help.
"use strict";

{
  const HELP = [
    ["/", "search"],
    ["↑ ↓", "along the list"],
    ["← →", "previous and next episode; beside a token's card, token"],
    ["[ ]", "previous and next token of the same colour class, such as clipped"],
    ["Esc", "close the card, or go back to the list"],
    ["?", "these keys"],
  ];

  const isTyping = (element) => /^(INPUT|TEXTAREA|SELECT)$/.test(element?.tagName || "");

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.defaultPrevented) return;
    if (event.key === "Escape") {
      if (isTyping(document.activeElement)) document.activeElement.blur();
      else escape();
      return;
    }
    if (isTyping(document.activeElement)) return;
    if (act(event.key)) event.preventDefault();
  });

  function escape() {
    const help = document.querySelector("dialog[open]");
    if (help) help.close();
    else if (!viewer.closeCard?.()) location.hash = viewer.listAddress(viewer.listed.values);
  }

  function act(key) {
    const view = viewer.parseAddress(location.hash).view;
    if (key === "/") return focusSearch();
    if (key === "?") return showHelp();
    if (view === "list" && key === "ArrowDown") return done(viewer.moveInList(1));
    if (view === "list" && key === "ArrowUp") return done(viewer.moveInList(-1));
    if (view !== "episode") return false;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (by) return viewer.moveToken(by) || done(viewer.moveEpisode(by));
    if (key === "[" || key === "]") return done(viewer.moveAlike(key === "[" ? -1 : 1));
    return false;
  }

  const done = () => true;

  function focusSearch() {
    const input = document.getElementById("search");
    input?.focus();
    input?.select();
    return Boolean(input);
  }

  function showHelp() {
    const rows = HELP.map(([keys, what]) =>
      element("tr", {}, element("th", {}, element("kbd", {}, keys)), element("td", {}, what)));
    const close = element("button", { type: "button" }, "Close");
    const dialog = element("dialog", { class: "help" },
      element("h2", {}, "Keys"), element("table", {}, rows), close);
    close.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
    return true;
  }
  viewer.showHelp = showHelp;
}
