// Whether the pool of nodes fits what the trainer takes, and what was decided.
import { h, number, duration, clock, hour, table, empty } from "./dom.js";
import { drawCharts } from "./overview.js";

export const title = "Balance";
const LOOKS = { grow: "warn", shrink: "warn", hold: "good" };

export function mount(root, context) {
  const now = h("div"), charts = h("div", { class: "cards" }), after = h("div");
  root.append(h("div", { class: "head" }, h("h1", { text: "Balance and scaling" })), now, charts, after);
  return {
    async update() {
      const { get, set } = context();
      const data = await get("balance");
      if (!data.balance) { now.replaceChildren(empty("This run has no balance report: it has not begun, or it trains on rows that do not change.")); return; }
      now.replaceChildren(h("div", { class: "two" }, data.balance.latest ? report("The last full window", data.balance.latest) : null, report(data.balance.latest ? "Since then" : "The first window so far", data.balance.current)));
      if (data.charts.length) drawCharts(charts, data.charts, { axis: "step", set: () => {} }); else charts.replaceChildren();
      after.replaceChildren(nodes((data.balance.latest || data.balance.current).nodes), decisions(data), workers(data.workers));
    },
  };
}

function report(name, one) {
  const { window, production, decision } = one;
  const gpus = (count) => `${count} GPU${count === 1 ? "" : "s"}`;
  const change = decision.delta ? ` ${production.gpus} to ${gpus(decision.target)}` : ` ${gpus(production.gpus)}`;
  const rows = [
    ["versions", `${window.since} to ${one.version}, ${window.steps} steps, ${window.counted} without an evaluation`], ["duration", `${duration(window.wall_seconds)}, ${duration(window.eval_seconds)} of it evaluation`],
    ["step", window.step_seconds === null ? "–" : `${duration(window.step_seconds)}, ${duration(window.batch_wait_seconds)} of it waiting`], ["trainer waits", number(window.wait_fraction, "share")],
    ["produced", `${number(production.produced)} samples, ${number(production.throughput_per_gpu)} /s per GPU`], ["entered", `${number(production.entered)} (${number(production.accept_rate, "share")})`],
    ["trained", number(production.consumed)], ["dropped as stale", `${number(production.stale_skipped)} (${number(production.stale_rate, "share")})`], ["entered / trained", number(production.produce_consume_ratio)],
  ];
  return h("section", { class: "card" }, h("h2", {}, `${name} `, h("span", { class: `badge ${LOOKS[decision.branch]}`, text: decision.branch + change })),
    decision.weight_transfer ? h("p", { class: "soft", text: "weights are being transferred: the numbers will change by themselves" }) : null,
    h("table", {}, h("tbody", {}, rows.map(([key, value]) => h("tr", {}, h("th", { scope: "row", text: key }), h("td", { text: value }))))));
}

function nodes(rows) {
  return h("section", { class: "card" }, h("h2", { text: "Nodes in the window" }), rows.length ? table([
    { key: "id", title: "node" }, { title: "state", show: (row) => h("span", { class: `badge ${{ healthy: "good", suspect: "warn" }[row.state] || "bad"}`, text: row.state }) },
    { key: "gpus", title: "GPUs", number: true }, { key: "produced", title: "produced", number: true }, { key: "accepted", title: "accepted", number: true },
    { title: "accept rate", number: true, show: (row) => number(row.accept_rate, "share") }, { title: "samples/s per GPU", number: true, show: (row) => number(row.throughput_per_gpu) },
  ], rows) : empty("No node was active."));
}

function decisions(data) {
  const box = h("section", { class: "card" }, h("h2", { text: "Decisions of the maintainer" }));
  if (!data.decisions.length) box.append(empty(data.maintained ? "None yet." : "This run has no maintainer: set resources.scaling.enabled, or start `rillflow maintain RUN`."));
  else box.append(table([
    { title: "when", show: (row) => h("span", { class: "nowrap", title: clock(row.time), text: hour(row.time) }) }, { title: "action", show: (row) => h("span", { class: `badge ${LOOKS[row.action] || (["failed", "died", "refused"].includes(row.action) ? "bad" : "")}`, text: row.action + (row.dry_run ? " (dry run)" : "") }) },
    { key: "why", title: "why" }, { key: "size", title: "nodes", number: true }, { title: "wanted", number: true, show: (row) => number(row.wanted) }, { title: "which", show: (row) => (row.nodes || []).join(", ") }, { key: "by", title: "by" },
  ], data.decisions));
  return box;
}

function workers(rows) {
  if (!rows.length) return "";
  return h("section", { class: "card" }, h("h2", { text: "Workers and their tags" }), table([
    { key: "name", title: "worker" }, { title: "can", show: (row) => row.tags.join(", ") || "nothing" }, { title: "does", show: (row) => row.lost ? h("span", { class: "bad", text: "lost" }) : row.process ? `${row.process}${row.rank === null ? "" : `, rank ${row.rank}`}` : "spare" },
  ], rows));
}
