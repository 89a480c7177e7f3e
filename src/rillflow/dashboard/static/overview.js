// How the run stands: what to look at first, then figures and curves.
import { h, number, duration, clock, table, empty, marked } from "./dom.js";
import { chart } from "./chart.js";

export const title = "Overview";

export function mount(root, context) {
  const advice = h("section", { "aria-label": "Advisories" }), waiting = h("div"), top = h("div"), figures = h("div", { class: "figures" }), charts = h("div", { class: "cards" }), policies = h("div");
  root.append(top, advice, waiting, figures, charts, policies);
  return {
    async update() {
      const { get, axis, args, set, width } = context();
      const zoom = { low: args.get("low"), high: args.get("high") };
      const data = await get("overview", { axis, ...zoom, width: 400 });
      top.replaceChildren(heading(data, axis, zoom, set));
      figures.replaceChildren(...data.figures.map(figure));
      drawCharts(charts, data.charts, { axis, ...zoom, set, width });
      policies.replaceChildren(...(data.policies.length > 1 ? [policyTable(data.policies)] : []));
      waiting.replaceChildren(...waits(data.waits));
      const told = await get("advisories");
      keepOpen(advice, advisories(told));
    },
  };
}

function advisories(told) {
  const looks = { problem: "Problem", warning: "Warning", hint: "Hint" };
  const found = told.advisories.map((one) => h("details", { class: `advice ${one.severity}`, "data-key": one.key, open: one.severity === "problem" },
    h("summary", {}, h("b", { text: `${looks[one.severity]}: ` }), marked(one.title)), h("p", { class: "soft said", text: one.why }), h("p", {}, h("b", { text: "What to do: " }), marked(one.what_to_do))));
  if (!found.length) found.push(h("div", { class: "advice healthy" }, h("b", { text: "Nothing to report: " }), "no rule finds anything wrong with this run."));
  if (told.unread.length) found.push(h("p", { class: "warn", text: `could not be read: ${told.unread.join("; ")}` }));
  return found;
}

// Replaces the children; what a reader has opened or closed stays so.
export function keepOpen(root, children) {
  const before = new Map([...root.querySelectorAll("details")].map((one) => [one.dataset.key, one.open]));
  root.replaceChildren(...children);
  for (const one of root.querySelectorAll("details")) if (before.has(one.dataset.key)) one.open = before.get(one.dataset.key);
}

function heading(data, axis, zoom, set) {
  const run = data.run;
  const parts = [h("h1", { text: run.recipe || run.name }), h("span", { class: "soft", text: `started ${clock(run.started)}, ${duration((run.ended ?? Date.now() / 1000) - run.started)}` })];
  if (run.reason) parts.push(h("span", { class: run.state === "failed" ? "bad" : "soft", text: run.reason.split("\n")[0] }));
  if (zoom.low) parts.push(h("button", { text: "Show all (Esc)", onclick: () => set({ low: null, high: null }) }));
  return h("div", {}, h("div", { class: "head" }, parts), run.description ? h("p", { class: "soft", text: run.description }) : null);
}

function figure(one) {
  return h("div", { class: "figure" }, h("small", { text: one.name }), h("b", { text: number(one.value, one.unit) }), h("small", { text: one.note }));
}

function waits(found) {
  return found.length ? [h("div", { class: "advice" }, h("b", { text: "Waiting now" }), found.map((wait) => h("p", { class: "soft", text: wait })))] : [];
}

const drawn = new WeakMap();

export function drawCharts(root, pictures, { axis, low, high, set }) {
  if (!root.isConnected) return; // another panel has been opened meanwhile
  if (!pictures.some((picture) => picture.lines.some((line) => line.points.length))) {
    root.replaceChildren(empty("No step has been trained yet: curves begin with the first."));
    return;
  }
  if (drawn.get(root)?.pictures === pictures && drawn.get(root).width === root.clientWidth) return; // nothing has changed
  drawn.set(root, { pictures, width: root.clientWidth });
  const style = getComputedStyle(root);
  const columns = style.gridTemplateColumns.split(" ").length;
  const width = Math.floor((root.clientWidth - (columns - 1) * 13) / columns) - (root.clientWidth < 700 ? 24 : 34);
  const span = low === null || low === undefined ? {} : { low: Number(low), high: Number(high) };
  root.replaceChildren(...pictures.filter((picture) => picture.lines.some((line) => line.points.length)).map((picture) => h("section", { class: "card", "data-chart": picture.key },
    h("h2", { text: picture.title, title: picture.help }), picture.help ? h("p", { class: "soft", text: picture.help }) : null,
    chart(picture, { width, axis, ...span, onzoom: (from, to) => set({ low: from, high: to }) }))));
}

function policyTable(rows) {
  return h("section", { class: "card" }, h("h2", { text: "Policies" }), table([
    { key: "policy", title: "policy" }, { key: "version", title: "version", number: true }, { key: "steps", title: "steps", number: true },
    { title: "reward", number: true, show: (row) => number(row.reward) }, { title: "groups ready", number: true, show: (row) => number(row.ready) },
  ], rows));
}
