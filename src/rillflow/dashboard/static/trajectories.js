// The browser of trajectories: a table to find one, then what its agents said, its token trees and its tokens.
import { h, s, number, duration, clock, table, select, delayed, empty } from "./dom.js";
import { tokenView } from "./tokens.js";

export const title = "Trajectories";
const PAGE = 50;
const FILTERS = ["first_step", "last_step", "least", "most", "version", "policy", "role", "status", "lane", "kept", "prompt"];

export function mount(root, context) {
  const list = browser(root, context), one = episode(root, context);
  return { update: () => (context().args.get("id") ? one.update(list.hide) : list.update(one.hide)) };
}

// ---------------------------------------------------------------- the table

function browser(root, context) {
  const tools = h("div", { class: "toolbar" }), rows = h("div"), pages = h("div", { class: "toolbar" });
  const box = h("div", {}, h("div", { class: "head" }, h("h1", { text: title })), h("section", { class: "card" }, tools, rows, pages));
  root.append(box);
  let drawn = "";
  return {
    hide: () => { box.hidden = true; },
    async update(hideOther) {
      const { get, args, set } = context();
      const query = Object.fromEntries([["order", args.get("order") || "-time"], ["offset", args.get("offset") || 0], ["limit", PAGE], ...FILTERS.map((name) => [name, args.get(name)])]);
      const data = await get("trajectories", query);
      hideOther();
      box.hidden = false;
      if (drawn !== JSON.stringify(data.choices)) { drawn = JSON.stringify(data.choices); tools.replaceChildren(...filters(data.choices, context)); }
      const filtered = FILTERS.some((name) => args.get(name));
      if (!data.count) rows.replaceChildren(empty(filtered ? "No trajectory fits these filters." : "No trajectory has been kept yet: the first come with the first steps (observe.trajectories in the recipe)."));
      else rows.replaceChildren(found(data.rows, query.order, context));
      pages.replaceChildren(...paging(data.count, Number(query.offset), set));
    },
  };
}

function filters(choices, context) {
  const set = (changes) => context().set({ ...changes, offset: null });
  const field = (name, label, size) => {
    const input = h("input", { type: name === "prompt" ? "search" : "text", inputmode: name === "prompt" ? null : "decimal", size, "aria-label": label, placeholder: label });
    input.value = context().args.get(name) || "";
    input.addEventListener("input", delayed(() => set({ [name]: input.value })));
    return input;
  };
  const choice = (name, label, values) => select(label, context().args.get(name) || "", [["", "all"], ...values.map((value) => [value, value])], (value) => set({ [name]: value }));
  return [
    field("prompt", "prompt's id", 14), field("first_step", "from step", 8), field("last_step", "to step", 8), field("least", "reward from", 9), field("most", "reward to", 8), field("version", "version", 7),
    ...(choices.policy.length > 1 ? [choice("policy", "policy", choices.policy)] : []), ...(choices.role.length ? [choice("role", "role", choices.role)] : []),
    choice("kept", "kept as", choices.kept), choice("status", "status", ["done", "failed"]), choice("lane", "lane", ["train", "evaluation"]),
  ];
}

function found(rows, order, context) {
  const { set } = context();
  const sort = (name) => set({ order: order === `-${name}` ? name : `-${name}`, offset: null });
  const plain = (key, text = key, help = "") => ({ key, title: text, number: true, sort: key, help, show: (row) => number(row[key]) });
  return table([
    { key: "id", title: "episode", sort: "id", show: (row) => h("a", { class: "mono", href: "#", text: row.id, tabindex: -1, onclick: (event) => event.preventDefault() }) },
    { title: "kept as", sort: "kept", show: (row) => h("span", { class: `badge ${{ best: "good", worst: "warn", failure: "bad" }[row.kept] || ""}`, text: row.kept }) },
    plain("step"), plain("reward"), { key: "prompt", title: "prompt", sort: "prompt", look: "nowrap" },
    ...(rows.some((row) => row.roles.length || row.policies.length > 1) ? [{ title: "roles", show: (row) => (row.roles.length ? row.roles : row.policies).join(", ") }] : []),
    plain("tokens"), plain("trained", "trained", "tokens that train"), plain("calls"), plain("forks"),
    { title: "versions", number: true, sort: "oldest", show: (row) => (row.oldest === null ? "–" : row.oldest === row.newest ? `${row.oldest}` : `${row.oldest}–${row.newest}`) },
    plain("advantage", "advantage", "mean over the trained tokens"), plain("gap", "gap", "mean difference of the log-probs of trainer and engine"),
    { title: "seconds", number: true, sort: "seconds", show: (row) => duration(row.seconds) },
    { title: "end", sort: "status", show: (row) => h("span", { class: row.status === "failed" ? "bad" : row.truncated ? "warn" : "", text: row.cause || (row.truncated ? "truncated" : row.status) }) },
  ], rows, { sorted: order, onsort: sort, opened: (row) => set({ id: row.id }), label: "Trajectories" });
}

function paging(count, offset, set) {
  const last = Math.min(offset + PAGE, count);
  return [
    h("span", { class: "soft", text: count ? `${number(offset + 1)} to ${number(last)} of ${number(count)}` : "" }),
    h("button", { text: "Back", disabled: offset === 0, onclick: () => set({ offset: Math.max(offset - PAGE, 0) || null }) }),
    h("button", { text: "More", disabled: last >= count, onclick: () => set({ offset: offset + PAGE }) }),
  ];
}

// ---------------------------------------------------------------- one episode

function episode(root, context) {
  const box = h("div", { hidden: true });
  root.append(box);
  let shown = "";
  return {
    hide: () => { box.hidden = true; },
    async update(hideOther) {
      const { get, args, set, run } = context();
      const key = `${run}|${args.get("id")}|${args.get("path")}|${args.get("sample")}|${args.get("colour")}`;
      if (key === shown) { hideOther(); box.hidden = false; return; } // what is kept does not change
      const data = await get("trajectory", { id: args.get("id") });
      hideOther();
      box.hidden = false;
      const path = Math.min(Number(args.get("path") || 0), Math.max(data.paths.length - 1, 0));
      const sample = Math.min(Number(args.get("sample") || 0), Math.max(data.samples.length - 1, 0));
      box.replaceChildren(
        h("div", { class: "head" }, h("button", { text: "← All trajectories", onclick: () => set({ id: null, path: null, sample: null, colour: null }) }), h("h1", { class: "mono", text: data.info.id })),
        facts(data), data.error ? h("details", { class: "advice problem", open: true }, h("summary", {}, h("b", { text: data.info.cause || "failed" })), h("pre", { text: data.error })) : "",
        ...data.trees.map((tree) => forest(tree, data, sample, set, Math.max(root.clientWidth - (root.clientWidth < 700 ? 46 : 74), 240))),
        h("div", { class: "two" }, conversation(data, path, set), data.samples.length ? await tokenView(data, sample, context) : ""),
        h("section", { class: "card" }, h("details", {}, h("summary", { text: "The prompt's payload" }), h("pre", { text: JSON.stringify(data.payload, null, 2) }))),
      );
      shown = key;
    },
  };
}

function facts(data) {
  const { info } = data;
  const told = [
    ["reward", number(info.reward)], ["kept as", info.kept], ["step", number(info.step)], ["prompt", info.prompt], ["group", `${info.group} (place ${info.place})`], ["tokens", `${number(info.tokens)}, ${number(info.trained)} trained`],
    ["calls", number(info.calls)], ["paths", `${data.samples.length}, ${info.forks} forked`], ["versions", info.oldest === null ? "–" : info.oldest === info.newest ? `${info.oldest}` : `${info.oldest} to ${info.newest}`], ["advantage", number(info.advantage)], ["log-prob gap", number(info.gap)], ["took", duration(info.seconds)], ["node", info.node || "–"], ["ended", clock(info.time)],
    ...Object.entries(data.rewards).map(([name, value]) => [name, number(value)]),
  ];
  return h("section", { class: "card facts" }, told.map(([name, value]) => h("div", {}, h("small", { class: "soft", text: name }), h("div", { text: value }))));
}

// A token tree: each row is a path, from its first token on the left; what paths share is drawn once.
function forest(tree, data, chosen, set, width) {
  const row = 26, height = tree.rows * row + 26, scale = (width - 8) / Math.max(tree.tokens, 1);
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: "tree", role: "img", "aria-label": `Token tree of ${tree.policy}: ${tree.rows} paths, ${tree.tokens} tokens` });
  const middle = (piece) => piece.row * row + 14;
  for (const piece of tree.pieces) {
    const before = tree.pieces[piece.parent];
    if (before && before.row !== piece.row) {
      const x = 4 + piece.begin * scale;
      svg.append(s("path", { class: "edge", d: `M${x} ${middle(before)}C${x + 6} ${middle(before)} ${x - 6} ${middle(piece)} ${x} ${middle(piece)}` }));
    }
  }
  const own = path(tree, chosen);
  for (const piece of tree.pieces) {
    const node = s("g", { class: `node ${own.has(piece) ? "chosen" : ""}`, tabindex: 0, role: "button", "aria-label": `Sample ${piece.sample}, tokens ${piece.begin} to ${piece.end}`,
      onclick: () => set({ sample: piece.sample, path: data.samples[piece.sample].path }), onkeydown: (event) => { if (event.key === "Enter") set({ sample: piece.sample, path: data.samples[piece.sample].path }); } },
    s("rect", { class: piece.trained ? "f2" : "f7 given", x: 4 + piece.begin * scale, y: piece.row * row + 6, width: Math.max((piece.end - piece.begin) * scale, 1), height: 16, rx: 2 }),
    s("title", { text: `tokens ${piece.begin} to ${piece.end}: ${piece.trained ? "sampled, train" : "given, masked"}${piece.shared > 1 ? `; shared by ${piece.shared} paths` : ""}${piece.fork ? `; forked: ${piece.fork}` : ""}` }));
    svg.append(node);
  }
  svg.append(s("text", { x: 4, y: height - 4, text: "0" }), s("text", { x: width - 4, y: height - 4, "text-anchor": "end", text: `${tree.tokens} tokens` }));
  return h("section", { class: "card" }, h("h2", { text: `Token tree${data.trees.length > 1 ? ` of ${tree.policy}` : ""}: ${tree.rows} path${tree.rows > 1 ? "s" : ""}` }), svg,
    h("div", { class: "legend" }, h("span", {}, h("i", { class: "f2" }), "sampled, trains"), h("span", {}, h("i", { class: "f7 given" }), "given, masked"), tree.cut ? h("span", { class: "warn", text: "only the first pieces are drawn" }) : null));
}

// The pieces of one sample, from its last back to the root.
function path(tree, sample) {
  const own = new Set();
  for (let piece = tree.pieces.findLast((one) => one.sample === sample); piece; piece = tree.pieces[piece.parent]) own.add(piece);
  return own;
}

function conversation(data, chosen, set) {
  const box = h("section", { class: "card" }, h("h2", { text: "What was said" }));
  if (!data.paths.length) { box.append(empty("No conversation was kept of this episode.")); return box; }
  if (data.paths.length > 1) {
    const names = data.paths.map((path, index) => [String(index), `${index + 1}: ${path.agent || path.policy}${path.fork ? `, forked (${path.fork})` : ""}`]);
    box.append(h("div", { class: "toolbar" }, select("path", String(chosen), names, (value) => set({ path: value, sample: sampleOf(data, Number(value)) }))));
  }
  const path = data.paths[chosen];
  if (path.left_out) box.append(h("p", { class: "soft", text: `${path.left_out} earlier messages are left out` }));
  box.append(...path.messages.map((message, index) => said(message, index < path.shared - path.left_out)));
  if (path.finish) box.append(h("p", { class: path.finish === "length" ? "warn" : "soft", text: path.finish === "length" ? "cut by its length" : `finished: ${path.finish}` }));
  return box;
}

function sampleOf(data, path) {
  const at = data.samples.findIndex((sample) => sample.path === path);
  return at < 0 ? null : at;
}

function said(message, shared) {
  const parts = [h("header", {}, h("b", { text: message.role || "?" }), message.name ? message.name : null, shared ? h("span", { text: "shared with another path" }) : null)];
  if (message.reasoning_content) parts.push(h("details", {}, h("summary", { text: "reasoning" }), h("pre", { text: message.reasoning_content })));
  const text = typeof message.content === "string" ? message.content : message.content ? JSON.stringify(message.content, null, 2) : "";
  if (text) parts.push(h("pre", { text }));
  for (const call of message.tool_calls || []) {
    const of = call.function || call;
    parts.push(h("div", { class: "call" }, h("b", { text: `→ ${of.name || "tool"}` }), h("pre", { text: typeof of.arguments === "string" ? of.arguments : JSON.stringify(of.arguments, null, 2) })));
  }
  return h("article", { class: `message ${message.role || ""}` }, parts);
}
