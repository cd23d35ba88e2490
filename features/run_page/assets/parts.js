// Makes buttons, sections and tables, and writes numbers and times as text.

function button(label, title, onClick) {
  const node = element("button", { type: "button", title }, [label]);
  node.addEventListener("click", () => onClick(node));
  return node;
}

// A section of the page that the navigation can jump to.
function section(id, title, children) {
  return element("section", { id }, [element("h2", {}, [title]), ...children]);
}

// A table; numbers of a column stand under each other. Those of one kind have equally many digits
// behind the point.
function table(headings, rows, { isOfOneKind = true } = {}) {
  const digits = headings.map((_, place) => digitsOf(rows.map((cells) => cells[place])));
  const head = element("tr", {}, headings.map((heading, place) =>
    element("th", { class: digits[place] === null ? null : "number" }, [heading])));
  const body = rows.map((cells) => element("tr", {}, cells.map((content, place) =>
    cellOf(content, isOfOneKind ? digits[place] : null))));
  return element("div", { class: "scrolls" }, [
    element("table", {}, [element("thead", {}, [head]), element("tbody", {}, body)]),
  ]);
}

// The digits behind the point that a column's numbers are shown with: four in the largest of them;
// null where it has no numbers.
function digitsOf(column) {
  const numbers = column.filter((content) => typeof content === "number");
  if (!numbers.length) {
    return null;
  }
  if (numbers.every(Number.isInteger)) {
    return 0;
  }
  const largest = Math.max(...numbers.map(Math.abs));
  return Math.min(6, Math.max(0, 3 - Math.floor(Math.log10(largest))));
}

function cellOf(content, digits) {
  if (typeof content === "number" || content === null) {
    const isAlike = content !== null && digits !== null;
    const text = isAlike ? content.toFixed(digits) : formatNumber(content);
    return element("td", { class: "number" }, [text]);
  }
  return element("td", {}, [content]);
}

// A text of the docs, in which code stands between backticks.
function prose(text) {
  const parts = text.split("`");
  const nodes = parts.map((part, number) =>
    number % 2 === 1 ? element("code", {}, [part]) : part,
  );
  return element("span", {}, nodes);
}

// Four digits, as people read them; "–" where there is no number.
function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) {
    return "–";
  }
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    return value.toExponential(2).replace("e+", "e");
  }
  return String(Number(value.toPrecision(size >= 1000 ? 6 : 4)));
}

// As in 2026-11-25 14:50:14, by the reader's clock.
function formatTime(seconds) {
  if (seconds === null || seconds === undefined) {
    return "";
  }
  const time = new Date(seconds * 1000);
  const two = (number) => String(number).padStart(2, "0");
  const day = [time.getFullYear(), two(time.getMonth() + 1), two(time.getDate())].join("-");
  const clock = [two(time.getHours()), two(time.getMinutes()), two(time.getSeconds())].join(":");
  return `${day} ${clock}`;
}

// As in "2 h 5 min".
function formatDuration(seconds) {
  const minutes = Math.round(seconds / 60);
  if (seconds < 60) {
    return `${Math.round(seconds)} s`;
  }
  if (minutes < 60) {
    return `${minutes} min`;
  }
  const hours = Math.floor(minutes / 60);
  if (hours < 48) {
    return `${hours} h ${minutes % 60} min`;
  }
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}
