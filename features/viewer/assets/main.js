// Starts the viewer: loads the table, draws the head, and shows the view that the address names.
"use strict";

{
  const main = document.getElementById("main");
  let searching = 0;

  async function start() {
    try {
      await viewer.loadTable();
    } catch (error) {
      fail(error, "The viewer's data cannot be read. Make it again with "
        + "python -m features.viewer.command RUN_DIR.");
      return;
    }
    drawHead();
    window.addEventListener("hashchange", () => show(true));
    await show(false);
    document.documentElement.dataset.ready = "1";
  }

  // Shows what the address says.
  async function show(moveFocus) {
    const address = viewer.parseAddress(location.hash);
    viewer.closeCard = null;
    const named = Object.hasOwn(viewer.views, address.view) ? address.view : "list";
    const view = viewer.views[named];
    const input = document.getElementById("search");
    if (address.view === "list" && input !== document.activeElement) {
      input.value = address.values.text || "";
    }
    document.documentElement.dataset.shown = "";
    try {
      await view(main, address);
    } catch (error) {
      fail(error, "This page cannot be shown.");
    }
    document.documentElement.dataset.shown = location.hash || "#list";
    if (moveFocus && !main.contains(document.activeElement) && document.activeElement !== input) {
      main.focus({ preventScroll: true });
    }
  }

  function fail(error, sentence) {
    viewer.replace(main, element("section", { class: "fault", role: "alert" },
      element("h2", {}, sentence), element("p", {}, viewer.visible(String(error.message)))));
  }

  function drawHead() {
    const { manifest } = viewer.table;
    const input = element("input", {
      type: "search", id: "search", placeholder: "Search all that was said  ( / )",
      autocomplete: "off", spellcheck: "false", "aria-label": "Search all that was said",
    });
    input.addEventListener("input", () => {
      clearTimeout(searching);
      searching = setTimeout(() => searchFor(input.value), 180);
    });
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      clearTimeout(searching);
      searchFor(input.value);
    });
    viewer.replace(document.getElementById("top"),
      element("a", { class: "home", href: "#list" }, "Episodes"),
      element("a", { class: "to-tasks", href: "#tasks" }, "Tasks"),
      element("span", { class: "runs", title: runNames(manifest) }, runPicker(manifest)),
      input,
      pages(manifest),
      manifest.goes_on ? element("span", { class: "goes-on", title: "The run makes this viewer "
        + "again as it goes on: load the page again." }, reach(manifest)) : null,
      faults(manifest),
      element("button", { type: "button", class: "keys", onclick: viewer.showHelp,
        "aria-label": "Keys" }, "?"));
    document.getElementById("skip").addEventListener("click", (event) => {
      event.preventDefault();
      main.focus();
    });
  }

  // How far a viewer reaches that was made while its run went on.
  function reach({ steps }) {
    const made = steps.filter((step) => step.kind === "train").map((step) => step.step);
    return made.length ? `the run goes on; up to step ${Math.max(...made)}`
      : "the run goes on; no step yet";
  }

  const runNames = (manifest) => manifest.runs.map((run) => viewer.plainText(run.folder)).join(", ");

  function runPicker(manifest) {
    if (manifest.runs.length === 1) return viewer.visible(manifest.runs[0].label);
    const select = element("select", { "aria-label": "Run" },
      element("option", { value: "" }, "all runs"),
      manifest.runs.map((run, number) =>
        element("option", { value: number }, `run ${number}: ${viewer.plainText(run.label)}`)));
    select.value = viewer.parseAddress(location.hash).values.run || "";
    select.addEventListener("change", () => {
      location.hash = viewer.listAddress({ ...viewer.listed.values, run: select.value });
    });
    return select;
  }

  // Pages of other features that lie beside the viewer, in the run's folder.
  function pages(manifest) {
    return (manifest.pages || []).filter(([, address]) => address.startsWith("../"))
      .map(([text, address]) => element("a", { class: "of-run", href: address },
        viewer.visible(text)));
  }

  // A text that is searched for is a filter of the list.
  function searchFor(text) {
    const address = viewer.parseAddress(location.hash);
    const values = address.view === "list" ? address.values : viewer.listed.values;
    if ((values.text || "") === text && address.view === "list") return;
    location.hash = viewer.listAddress({ ...values, text });
  }

  function faults(manifest) {
    const number = manifest.faults.length + manifest.further_faults;
    if (!number) return null;
    const list = element("ul", {}, manifest.faults.map((fault) =>
      element("li", {}, viewer.visible(fault))));
    const rest = manifest.further_faults
      ? element("p", {}, `and ${manifest.further_faults} more`) : null;
    return element("details", { class: "faults" },
      element("summary", {}, `${plural(number, "note")} on the records`), list, rest);
  }

  start();
}
