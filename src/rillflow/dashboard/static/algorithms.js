// The data algorithms of a run: what they are, what they did, what they have learnt.
import { h, number, table, empty } from "./dom.js";
import { drawCharts } from "./overview.js";

export const title = "Data algorithms";

export function mount(root, context) {
  const what = h("div"), charts = h("div", { class: "cards" }), learnt = h("div");
  root.append(h("div", { class: "head" }, h("h1", { text: title })), what, charts, learnt);
  return {
    async update() {
      const { get, axis, args, set } = context();
      const zoom = { low: args.get("low"), high: args.get("high") };
      const data = await get("algorithms", { axis, ...zoom, width: 400 });
      what.replaceChildren(h("div", { class: "two" }, hooks(data), dropped(data)));
      if (data.charts.length) drawCharts(charts, data.charts, { axis, ...zoom, set }); else charts.replaceChildren();
      learnt.replaceChildren(states(data.states));
    },
  };
}

function hooks(data) {
  const one = (kind) => (hook) => ({ kind, name: hook.name, options: Object.keys(hook.options).length ? JSON.stringify(hook.options) : "" });
  const rows = [...data.curators.map(one("curator")), ...data.filters.map(one("filter")), one("sampler")(data.sampler), ...data.trainers.map((trainer) => ({
    kind: `trainer of ${trainer.policy}`, name: trainer.algorithm || "", options: Object.entries(trainer).filter(([key]) => !["policy", "algorithm"].includes(key)).map(([key, value]) => `${key} ${value}`).join(", "),
  }))];
  return h("section", { class: "card" }, h("h2", { text: `Configuration${data.staleness === null || data.staleness === undefined ? "" : ` (staleness at most ${data.staleness})`}` }),
    table([{ key: "kind", title: "kind" }, { key: "name", title: "name" }, { title: "options", show: (row) => h("code", { text: row.options }) }], rows));
}

function dropped(data) {
  const rows = [
    ...(data.curators.length || data.skipped ? [{ what: "prompts skipped by curators", count: data.skipped, of: data.taken }] : []),
    ...data.filtered.map((row) => ({ what: `groups of ${row.policy} dropped: ${row.cause}`, count: row.count, of: data.groups })),
  ];
  const box = h("section", { class: "card" }, h("h2", { text: "Dropped prompts and groups" }));
  box.append(rows.length ? table([
    { key: "what", title: "what" }, { key: "count", title: "count", number: true }, { title: "share", number: true, show: (row) => number(row.of ? row.count / row.of : 0, "share") },
    { title: "", look: "bars", show: (row) => h("span", { class: "bar f4", "width%": row.of ? Math.min((100 * row.count) / row.of, 100) : 0 }) },
  ], rows) : empty("Nothing: every prompt was played and every group was kept."));
  return box;
}

function states(rows) {
  if (!rows.length) return "";
  return h("section", { class: "card" }, h("h2", { text: "Learned state" }), table([{ key: "hook", title: "hook" }, { key: "key", title: "key" }, { title: "value", show: (row) => h("code", { text: row.value }) }], rows));
}
