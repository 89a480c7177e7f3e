// From prompts to trained samples, as counts with causes.
import { h, s, number, table, empty } from "./dom.js";

export const title = "Flow";
const COLOURS = { trained: 2, evaluated: 2, filtered: 4, expired: 3, failed: 1, skipped: 7, playing: 0, open: 5, ready: 5, leased: 0 };

export function mount(root, context) {
  const body = h("div");
  root.append(h("div", { class: "head" }, h("h1", { text: title }), h("span", { class: "soft", text: "every prompt that was taken is in exactly one place (rillflow audit)" })), body);
  return {
    async update() {
      const data = await context().get("flow");
      if (!data.prompts) { body.replaceChildren(empty("This run has no ledger: it has not begun, or it trains on rows that do not change.")); return; }
      body.replaceChildren(prompts(data.prompts, body.clientWidth - 34), episodes(data), streams(data.streams), ...evaluation(data.evaluation));
    },
  };
}

function ends(prompts) {
  const found = prompts.ends.map((end) => ({ ...end, name: end.cause ? `${end.state}: ${end.cause}` : prompts.words[end.state] || end.state }));
  return found.sort((a, b) => (a.state === "trained" ? -1 : b.state === "trained" ? 1 : b.count - a.count));
}

function prompts(data, width) {
  const rows = ends(data);
  const all = [...rows.map((row) => ({ ...row, of: data.admitted })), ...(data.skipped ? [{ state: "skipped", name: "skipped by curators", count: data.skipped, of: data.taken }] : [])];
  return h("section", { class: "card" }, h("h2", { text: `Prompts: ${number(data.taken)} taken, ${number(data.admitted)} admitted` }),
    width > 640 ? h("div", { class: "wide" }, sankey(data, rows, width)) : null, bars(all, Math.max(data.taken, 1)));
}

function bars(rows, total, what = "prompts") {
  return table([
    { key: "name", title: what }, { key: "count", title: "count", number: true },
    { title: "share", number: true, show: (row) => number(row.count / total, "share") },
    { title: "", look: "bars", show: (row) => h("span", { class: `bar f${COLOURS[row.state] ?? 7}`, "width%": (100 * row.count) / total }) },
  ], rows);
}

function sankey(data, rows, width) {
  const gap = 12, least = 12, room = 190, scale = room / Math.max(data.taken, 1), thick = 14;
  const columns = [0, Math.floor(width * 0.28), Math.floor(width * 0.6)];
  const ends = [...rows, ...(data.skipped ? [{ state: "skipped", name: "skipped", count: data.skipped }] : [])];
  const height = Math.max(room, ends.reduce((sum, row) => sum + Math.max(row.count * scale, least) + gap, 0)) + 20;
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Prompts from the source to their ends" });
  const node = (column, y, tall, colour, text) => {
    svg.append(s("rect", { class: `f${colour}`, x: columns[column], y, width: thick, height: Math.max(tall, 1.5), rx: 2 }));
    svg.append(s("text", { class: "strong", x: columns[column] + thick + 8, y: y + Math.max(tall / 2, 1) + 4, text }));
  };
  const stream = (from, y0, to, y1, tall, colour) => {
    const [a, b] = [columns[from] + thick, columns[to]], middle = (a + b) / 2, size = Math.max(tall, 1.5);
    svg.append(s("path", { class: `stream f${colour}`, d: `M${a} ${y0}C${middle} ${y0} ${middle} ${y1} ${b} ${y1}V${y1 + size}C${middle} ${y1 + size} ${middle} ${y0 + size} ${a} ${y0 + size}Z` }));
  };
  stream(0, 10, 1, 10, data.admitted * scale, 0);
  let from = 10, to = 10;
  for (const row of ends) {
    const tall = row.count * scale, colour = COLOURS[row.state] ?? 7;
    // What curators skip was never admitted.
    stream(row.state === "skipped" ? 0 : 1, row.state === "skipped" ? 10 + data.admitted * scale : from, 2, to, tall, colour);
    node(2, to, tall, colour, `${row.name}  ${number(row.count)}`);
    from += tall;
    to += Math.max(tall, least) + gap;
  }
  node(0, 10, data.taken * scale, 0, `taken  ${number(data.taken)}`);
  node(1, 10, data.admitted * scale, 0, `admitted  ${number(data.admitted)}`);
  return svg;
}

function causes(found) {
  return Object.entries(found).map(([name, count]) => `${name} ${number(count)}`).join(", ");
}

function episodes(data) {
  const { episodes: played, samples } = data;
  const told = [
    { name: "leased to nodes", count: played.leased, why: "" }, { name: "completed", count: played.completed, why: causes(played.rewarded_ends) },
    { name: "failed", count: played.failed, why: causes(played.failures) }, { name: "returned", count: played.returned, why: causes(played.returned_by) },
    { name: "refused", count: played.refused, why: "too late, or already there" }, { name: "in progress", count: played.held, why: "" },
  ];
  const made = [
    { name: "produced", count: samples.produced, why: "sent by nodes" }, { name: "accepted", count: samples.accepted, why: "in time and whole" },
    { name: "entered", count: samples.entered, why: "passed the filters; once for every stream" }, { name: "trained", count: samples.consumed, why: "" },
    { name: "dropped as stale", count: samples.stale, why: "older than the staleness bound" },
    { name: "rolled back", count: data.rolled_back, why: "batches of orphaned versions" }, { name: "quarantined", count: data.quarantined, why: "rows that could not be read" },
  ].filter((row) => row.count || !["rolled back", "quarantined"].includes(row.name));
  const columns = (what) => [{ key: "name", title: what }, { key: "count", title: "count", number: true }, { key: "why", title: "causes" }];
  return h("div", { class: "two" }, h("section", { class: "card" }, h("h2", { text: "Episodes" }), table(columns("episodes"), told)),
    h("section", { class: "card" }, h("h2", { text: "Samples" }), table(columns("samples"), made)));
}

function streams(found) {
  return h("div", { class: "two" }, found.map((stream) => {
    const rows = stream.ends.map((end) => ({ ...end, name: end.cause ? `${end.state}: ${end.cause}` : end.state }));
    const total = Math.max(rows.reduce((sum, row) => sum + row.count, 0), 1);
    return h("section", { class: "card" }, h("h2", { text: `Stream of ${stream.policy}: groups` }), bars(rows, total, "groups"));
  }));
}

function evaluation(data) {
  if (!data.admitted) return [];
  const rows = data.ends.map((end) => ({ ...end, name: end.cause ? `${end.state}: ${end.cause}` : end.state }));
  return [h("section", { class: "card" }, h("h2", { text: `Held-out prompts: ${number(data.admitted)}` }), bars(rows, data.admitted))];
}
