// Elements and numbers. Text from a run is only ever set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, options, children) {
  for (const [name, value] of Object.entries(options || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "text") element.textContent = value;
    else if (name === "width%") element.style.width = `${value}%`;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function h(tag, options, ...children) {
  return filled(document.createElement(tag), options, children);
}

export function s(tag, options, ...children) {
  return filled(document.createElementNS(SVG, tag), options, children);
}

export function number(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (unit === "share") return `${(100 * value).toFixed(Math.abs(value) < 0.0995 && value !== 0 ? 1 : 0)} %`;
  const size = Math.abs(value);
  let text;
  if (value === 0) text = "0";
  else if (Number.isInteger(value) && size < 1e6) text = value.toLocaleString("en");
  else if (size >= 1e9) text = `${(value / 1e9).toPrecision(3)}G`;
  else if (size >= 1e6) text = `${(value / 1e6).toPrecision(3)}M`;
  else if (size >= 1e4) text = `${(value / 1e3).toPrecision(3)}k`;
  else if (size >= 0.001) text = String(Number(value.toPrecision(3)));
  else text = value.toExponential(1);
  return unit ? `${text} ${unit}` : text;
}

export function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) { value /= 1000; at += 1; }
  return `${at ? value.toPrecision(3) : value} ${units[at]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export function clock(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleString() : "–";
}

export function hour(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleTimeString() : "–";
}

// A text in which `commands` stand between backticks.
export function marked(text) {
  return text.split("`").map((part, index) => (index % 2 ? h("code", { text: part }) : part));
}

export function empty(text) {
  return h("p", { class: "empty" }, marked(text));
}

// A table: columns are {key, title, number, look, show(row), sort}. `opened` makes its rows links.
export function table(columns, rows, { opened, sorted, onsort, label } = {}) {
  const head = columns.map((column) => {
    const mark = sorted && sorted.replace("-", "") === column.sort ? (sorted.startsWith("-") ? " ↓" : " ↑") : "";
    const title = onsort && column.sort ? h("button", { text: column.title + mark, onclick: () => onsort(column.sort) }) : column.title + mark;
    const order = mark ? (sorted.startsWith("-") ? "descending" : "ascending") : null;
    return h("th", { class: column.number ? "number" : column.look, scope: "col", "aria-sort": order, title: column.help }, title);
  });
  const body = rows.map((row) => {
    const cells = columns.map((column) => {
      const shown = column.show ? column.show(row) : row[column.key];
      const text = typeof shown === "number" ? number(shown) : shown;
      return h("td", { class: column.number ? "number" : column.look }, text === null || text === undefined ? "–" : text);
    });
    const options = opened ? { class: "open", tabindex: 0, onclick: () => opened(row), onkeydown: (event) => { if (event.key === "Enter") opened(row); } } : {};
    return h("tr", options, cells);
  });
  return h("div", { class: "scroll" }, h("table", { "aria-label": label }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)));
}

export function select(label, value, choices, onchange) {
  const options = choices.map(([key, text]) => h("option", { value: key, selected: key === value, text }));
  return h("label", {}, label, h("select", { onchange: (event) => onchange(event.target.value) }, options));
}

export function delayed(work, milliseconds = 250) {
  let timer;
  return (...values) => { clearTimeout(timer); timer = setTimeout(() => work(...values), milliseconds); };
}
