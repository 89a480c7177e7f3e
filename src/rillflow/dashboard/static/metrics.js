// Every number that the steps of a run have left, found by name.
import { h, delayed, empty } from "./dom.js";
import { drawCharts } from "./overview.js";

export const title = "All metrics";
const SHOWN = 24;

export function mount(root, context) {
  const charts = h("div", { class: "cards" }), count = h("span", { class: "soft" });
  const search = h("input", { type: "search", placeholder: "Part of a name, such as clip or episode/", "aria-label": "Find a metric" });
  search.value = context().args.get("find") || "";
  search.addEventListener("input", delayed(() => context().set({ find: search.value, low: null, high: null })));
  root.append(h("div", { class: "head" }, h("h1", { text: title })), h("div", { class: "toolbar" }, search, count), charts);
  let names = null;
  return {
    async update() {
      const { get, axis, args, set } = context();
      const zoom = { low: args.get("low"), high: args.get("high") };
      const find = (args.get("find") || "").toLowerCase();
      if (names === null) names = (await get("metrics")).names;
      const wanted = names.filter((name) => name.toLowerCase().includes(find));
      const data = await get("metrics", { names: wanted.slice(0, SHOWN).join(","), axis, ...zoom, width: 400 });
      names = data.names;
      count.textContent = wanted.length > SHOWN ? `${SHOWN} of ${wanted.length}: type to find others` : `${wanted.length}`;
      if (wanted.length) drawCharts(charts, data.charts, { axis, ...zoom, set });
      else charts.replaceChildren(empty(names.length ? "No metric has this in its name." : "No step has been trained yet."));
    },
  };
}
