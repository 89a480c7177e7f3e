// Published versions with their sizes and probes, and what the nodes have transferred.
import { h, number, bytes, duration, clock, hour, table, empty } from "./dom.js";

export const title = "Weights";

export function mount(root, context) {
  const body = h("div");
  root.append(h("div", { class: "head" }, h("h1", { text: title }), h("span", { class: "soft", text: "an engine serves a version after it has reproduced its probe" })), body);
  return {
    async update() {
      const data = await context().get("weights");
      if (!data.policies.length) { body.replaceChildren(empty("This run publishes no weights.")); return; }
      body.replaceChildren(...data.troubles.map((text) => h("div", { class: "advice problem", text })), transfers(data.transfers), ...data.policies.map(policy));
    },
  };
}

function transfers(rows) {
  const box = h("section", { class: "card" }, h("h2", { text: "Transfers to nodes" }));
  if (!rows.length) box.append(empty("No node has reported a transfer: engines in their own processes download weights themselves."));
  else box.append(table([
    { key: "node", title: "node", look: "nowrap" }, { key: "policy", title: "policy" }, { title: "version served", number: true, show: (row) => number(row.version) },
    { title: "loads", number: true, show: (row) => number(row.loads) }, { title: "as deltas", number: true, show: (row) => number(row.loads ? row.delta_loads / row.loads : 0, "share") },
    { title: "pulled", number: true, show: (row) => bytes(row.pull_bytes) }, { title: "bytes/load", number: true, show: (row) => bytes(row.loads ? Math.round(row.pull_bytes / row.loads) : 0) },
    { title: "download/load", number: true, show: (row) => duration(row.loads ? row.pull_seconds / row.loads : 0) },
    { title: "pause/load", number: true, show: (row) => duration(row.loads ? row.pause_seconds / row.loads : 0) },
  ], rows));
  return box;
}

function policy(one) {
  const box = h("section", { class: "card" }, h("h2", { text: `${one.policy}: ${one.head === null ? "nothing published yet" : `version ${one.head}`}${one.orphaned ? `, ${one.orphaned} versions orphaned` : ""}` }));
  if (one.unknown) box.append(h("p", { class: "bad", text: one.unknown }));
  if (one.versions.length) {
    const full = Math.max(...one.versions.map((version) => version.full_bytes), 1);
    box.append(table([
      { title: "version", number: true, show: (row) => number(row.version) }, { title: "published", show: (row) => h("span", { class: "nowrap", title: clock(row.created), text: hour(row.created) }) },
      { title: "full size", number: true, show: (row) => row.full_bytes ? bytes(row.full_bytes) : "–" },
      { title: "delta", number: true, show: (row) => row.delta_bytes ? `${bytes(row.delta_bytes)} (${number(row.delta_bytes / full, "share")})` : "–" },
      { title: "delta of", number: true, show: (row) => number(row.delta_of) },
      { title: "probe", look: "nowrap", show: (row) => row.probe ? `${row.probe.prompts} prompts, within ${number(row.probe.tolerance)}` : "none" },
    ], one.versions));
  }
  return box;
}
