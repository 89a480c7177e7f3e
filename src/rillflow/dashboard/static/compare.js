// Two runs side by side: figures, curves in the same charts, and where their recipes differ.
import { h, number, table, select, empty } from "./dom.js";
import { drawCharts } from "./overview.js";

export const title = "Compare";
export const offered = (session) => session.runs.length > 1;

export function mount(root, context) {
  const tools = h("div", { class: "toolbar" }), top = h("div"), charts = h("div", { class: "cards" }), recipe = h("div");
  root.append(h("div", { class: "head" }, h("h1", { text: title })), tools, top, charts, recipe);
  return {
    async update() {
      const { get, axis, args, set, run, runs } = context();
      const others = runs.map((one) => one.name).filter((name) => name !== run);
      const other = others.includes(args.get("other")) ? args.get("other") : others[0];
      const zoom = { low: args.get("low"), high: args.get("high") };
      const data = await get("compare", { other, axis, ...zoom, width: 400 });
      if (!tools.contains(document.activeElement)) tools.replaceChildren(h("span", {}, h("b", { text: "A " }), run), select("B", other, others.map((name) => [name, name]), (value) => set({ other: value })), zoom.low ? h("button", { text: "Show all (Esc)", onclick: () => set({ low: null, high: null }) }) : "");
      top.replaceChildren(figures(data));
      drawCharts(charts, paired(data.charts), { axis, ...zoom, set });
      recipe.replaceChildren(differences(data.recipe));
    },
  };
}

// The curves of B are dashed.
function paired(pictures) {
  return pictures.map((picture) => ({ ...picture, lines: picture.lines.map((line) => ({ ...line, dashed: line.name.startsWith("B ") })) }));
}

function figures(data) {
  const change = (row) => (row.left && row.right !== null ? `${row.right >= row.left ? "+" : ""}${(100 * (row.right / row.left - 1)).toFixed(1)} %` : "");
  const rows = [...data.figures];
  return h("section", { class: "card" }, h("h2", { text: "Figures" }), table([
    { key: "name", title: "" }, { title: "A", number: true, show: (row) => number(row.left, row.unit) }, { title: "B", number: true, show: (row) => number(row.right, row.unit) }, { title: "B to A", number: true, show: change },
  ], rows));
}

function differences(found) {
  const box = h("section", { class: "card" }, h("h2", { text: "Where the recipes differ" }));
  if (!found.rows.length) { box.append(empty("They are the same.")); return box; }
  const shown = (value, tag) => (value === null ? h("span", { class: "soft", text: "–" }) : h(tag, { class: "mono", text: value }));
  box.append(table([{ title: "setting", show: (row) => h("code", { text: row.path }) }, { title: "A", show: (row) => shown(row.left, "del") }, { title: "B", show: (row) => shown(row.right, "ins") }], found.rows));
  if (found.left_out) box.append(h("p", { class: "soft", text: `and ${found.left_out} more` }));
  return box;
}
