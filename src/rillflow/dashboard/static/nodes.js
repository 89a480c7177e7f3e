// Rollout nodes: the mean of the fleet beside the worst, then each node.
import { h, number, duration, table, empty } from "./dom.js";

export const title = "Nodes";

export function mount(root, context) {
  const body = h("div");
  root.append(h("div", { class: "head" }, h("h1", { text: title })), body);
  return {
    async update() {
      const { get, operated, post } = context();
      const data = await get("nodes");
      if (!data.nodes.length) { body.replaceChildren(empty("No rollout node has joined yet.")); return; }
      const notes = Object.entries(data.notes).map(([subject, text]) => h("p", { class: "soft", text: `${subject}: ${text}` }));
      body.replaceChildren(
        data.live ? "" : h("p", { class: "soft", text: "The run is not running: these are the last values in its ledger." }),
        data.fleet.length ? fleet(data.fleet) : "", h("section", { class: "card" }, h("h2", { text: data.nodes.length + data.left_out === 1 ? "1 node" : `${data.nodes.length + data.left_out} nodes` }), rows(data.nodes, operated, post), notes),
      );
    },
  };
}

function fleet(measures) {
  return h("section", { class: "card" }, h("h2", { text: "The fleet" }), table([
    { key: "title", title: "measure" }, { title: "mean", number: true, show: (row) => number(row.mean, row.unit) },
    { title: "worst", number: true, show: (row) => h("span", { class: apart(row) ? "bad" : "", text: number(row.worst, row.unit) }) }, { key: "node", title: "node", look: "nowrap" },
  ], measures));
}

// Whether the worst is less than half as good as the mean.
function apart(row) {
  const [less, more] = [Math.min(row.mean, row.worst), Math.max(row.mean, row.worst)];
  return more > 0 && less / more < 0.5;
}

function rows(nodes, operated, post) {
  const columns = [
    { title: "node", look: "nowrap", show: (row) => h("b", { text: row.name }) },
    { title: "state", show: (row) => h("span", { class: `badge ${row.state === "healthy" ? "good" : "bad"}`, text: row.leaving && row.state === "healthy" ? "leaving" : row.state }) },
    { key: "active", title: "active tag" },
    { title: "episodes", number: true, show: (row) => `${row.held} of ${row.capacity}` },
    { key: "completed", title: "completed", number: true }, { title: "failed", number: true, show: (row) => h("span", { class: row.failed_share > 0.2 ? "bad" : "", text: number(row.failed) }) },
    { title: "s/episode", number: true, show: (row) => number(row.pace) }, { title: "samples/s", number: true, show: (row) => number(row.throughput) },
    { title: "versions behind", number: true, show: (row) => number(row.behind) }, { title: "last heartbeat", number: true, show: (row) => `${duration(row.seen)} ago` },
    { title: "tokens sampled", number: true, show: (row) => number(sum(row.stats, ".generated_tokens")) },
  ];
  if (operated) {
    columns.push({ title: "", show: (row) => row.state === "healthy" && !row.leaving ? h("button", { text: "Retire", onclick: async () => {
      if (confirm(`Retire ${row.name}? It ends what it plays and leaves.`)) await post("retire", { node: row.name }).catch((error) => alert(error.message));
    } }) : "" });
  }
  return table(columns, nodes);
}

function sum(stats, end) {
  const found = Object.entries(stats).filter(([name]) => name.endsWith(end)).map(([, value]) => value);
  return found.length ? found.reduce((a, b) => a + b, 0) : null;
}
