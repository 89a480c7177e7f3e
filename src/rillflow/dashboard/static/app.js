// The frame around the panels: which run and panel are shown (in the address), when they are updated, and the keys.
import { h, duration } from "./dom.js";
import * as overview from "./overview.js";
import * as metrics from "./metrics.js";
import * as timeline from "./timeline.js";
import * as flow from "./flow.js";
import * as nodes from "./nodes.js";
import * as trajectories from "./trajectories.js";
import * as weights from "./weights.js";
import * as balance from "./balance.js";
import * as algorithms from "./algorithms.js";
import * as logs from "./logs.js";
import * as compare from "./compare.js";

const PANELS = { overview, trajectories, timeline, flow, nodes, weights, balance, algorithms, metrics, logs, compare };
const EVERY = 2000; // milliseconds between updates of a run that runs, at least
const SLOWEST = 16000; // and at most
const SHARE = 40; // an update is followed by a pause this many times as long, so that an open page costs little
const SESSION = 10000; // milliseconds between two looks at the list of runs
const REMEMBERED = 32; // answers that are kept for comparing
const THEMES = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" };

const state = { session: null, asked: 0, run: "", panel: "overview", args: new URLSearchParams(), shown: null, paused: false, generation: 0, changed: false, quiet: 0 };
const answers = new Map(); // by address: what the server answered last, and its tag
const root = document.getElementById("content");

// Where the server says that nothing has changed, the very object of the last answer is returned again.
export async function api(path, query = {}, options = {}) {
  const words = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== ""));
  const address = `${path}?${words}`, before = answers.get(address);
  const headers = { "x-rillflow-dashboard": "1", ...(before ? { "if-none-match": before.tag } : {}) };
  const reply = await fetch(address, { ...options, headers });
  if (reply.status === 304) return before.body;
  const body = await reply.json().catch(() => ({ error: `the dashboard answered with status ${reply.status}`, hint: "" }));
  if (!reply.ok) throw Object.assign(new Error(body.error), { hint: body.hint });
  remember(address, reply.headers.get("etag"), body);
  return body;
}

function remember(address, tag, body) {
  state.changed = true;
  answers.delete(address);
  if (!tag) return;
  answers.set(address, { tag, body });
  if (answers.size > REMEMBERED) answers.delete(answers.keys().next().value);
}

function context() {
  const run = state.run;
  return {
    run,
    runs: state.session.runs,
    args: state.args,
    get: (view, query, of = run) => api(`/api/runs/${encodeURIComponent(of)}/${view}`, query),
    post: (action, body) => api(`/api/runs/${encodeURIComponent(run)}/${action}`, {}, { method: "POST", body: JSON.stringify(body || {}) }),
    operated: ((of) => Boolean(of && of.operated && of.state === "running"))(current()),
    set: (changes) => go(run, state.panel, changes, true),
    go: (panel, changes) => go(run, panel, changes, false),
    width: (share = 1, least = 240) => Math.max(Math.floor(root.clientWidth * share), least),
    axis: localStorage.getItem("axis") === "time" ? "time" : "step",
  };
}

function current() {
  return state.session.runs.find((run) => run.name === state.run);
}

// ---------------------------------------------------------------- the address

function go(run, panel, changes = {}, keep = false) {
  const args = new URLSearchParams(keep ? state.args : {});
  for (const [name, value] of Object.entries(changes || {})) {
    if (value === null || value === undefined || value === "") args.delete(name); else args.set(name, value);
  }
  const words = args.toString();
  location.hash = `#/${encodeURIComponent(run)}/${panel}${words ? `?${words}` : ""}`;
}

function readAddress() {
  const [path, words] = location.hash.replace(/^#\//, "").split("?");
  const [run, panel] = path.split("/").map(decodeURIComponent);
  const known = state.session.runs.some((each) => each.name === run);
  return { run: known ? run : state.session.runs[0].name, panel: PANELS[panel] ? panel : "overview", args: new URLSearchParams(words || "") };
}

async function follow() {
  const next = readAddress();
  const same = state.shown && next.run === state.run && next.panel === state.panel;
  Object.assign(state, next);
  drawFrame();
  if (!same) {
    state.generation += 1;
    root.replaceChildren();
    state.shown = PANELS[state.panel].mount(root, context);
    document.title = `${PANELS[state.panel].title} · ${state.run} · Rillflow`;
    scrollTo(0, 0);
    document.querySelector("nav [aria-current]").scrollIntoView({ block: "nearest", inline: "center" });
  }
  await update();
}

// ---------------------------------------------------------------- updates

async function update() {
  const { shown, generation } = state;
  try {
    await shown.update();
    if (generation === state.generation) document.getElementById("failure")?.remove();
  } catch (error) {
    if (generation !== state.generation) return;
    const told = h("div", { class: "error", id: "failure", role: "alert" }, h("b", { text: error.message }), error.hint ? h("p", { text: error.hint }) : null);
    document.getElementById("failure")?.remove();
    root.prepend(told);
  }
}

async function tick() {
  if (document.hidden || state.paused || current().state !== "running") {
    setTimeout(tick, EVERY);
    return;
  }
  const begun = performance.now();
  await look();
  drawFrame();
  state.changed = false;
  await update();
  state.quiet = state.changed ? 0 : state.quiet + 1;
  setTimeout(tick, Math.min(Math.max(EVERY * 2 ** state.quiet, SHARE * (performance.now() - begun)), SLOWEST));
}

// The list of runs, with their states.
async function look() {
  if (performance.now() - state.asked < SESSION) return;
  state.asked = performance.now();
  try {
    state.session = await api("/api/session");
  } catch { /* the panel says what is wrong */ }
}

// ---------------------------------------------------------------- the frame

function drawFrame() {
  const runs = document.getElementById("run"), run = current();
  if (runs.options.length !== state.session.runs.length) {
    runs.replaceChildren(...state.session.runs.map((each) => h("option", { value: each.name, text: each.name })));
  }
  runs.value = state.run;
  const badge = document.getElementById("state");
  const look = { running: "hint", finished: "good", failed: "bad", stopped: "warn" }[run.state] || "";
  badge.className = `badge ${look}`;
  badge.textContent = state.paused && run.state === "running" ? "paused" : run.state + (run.state === "running" ? ` ${duration(Date.now() / 1000 - run.started)}` : "");
  badge.title = run.reason || "";
  document.getElementById("stop").hidden = !(run.operated && run.state === "running");
  const panels = document.getElementById("panels"), key = [state.run, state.panel, ...offered()].join("|");
  if (panels.dataset.key === key) return; // a link that has the focus keeps it
  panels.dataset.key = key;
  panels.replaceChildren(...offered().map((name, index) => h("a", {
    href: `#/${encodeURIComponent(state.run)}/${name}`, "aria-current": name === state.panel ? "page" : null,
  }, PANELS[name].title, index < 10 ? h("kbd", { text: (index + 1) % 10 }) : null)));
}

function offered() {
  return Object.keys(PANELS).filter((name) => !PANELS[name].offered || PANELS[name].offered(state.session));
}

function drawTheme() {
  const chosen = localStorage.getItem("theme") || "auto";
  if (chosen === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = chosen;
  document.getElementById("theme").textContent = THEMES[chosen];
}

function nextTheme() {
  const names = Object.keys(THEMES);
  localStorage.setItem("theme", names[(names.indexOf(localStorage.getItem("theme") || "auto") + 1) % names.length]);
  drawTheme();
}

// ---------------------------------------------------------------- keys

function besideRun(by) {
  const names = state.session.runs.map((run) => run.name);
  go(names[(names.indexOf(state.run) + by + names.length) % names.length], state.panel);
}

function moveRow(by) {
  const rows = [...root.querySelectorAll("tr.open")];
  if (rows.length) rows[Math.min(Math.max(rows.indexOf(document.activeElement) + by, 0), rows.length - 1)].focus();
}

function toggleAxis() {
  localStorage.setItem("axis", context().axis === "time" ? "step" : "time");
  go(state.run, state.panel, { low: null, high: null }, true);
  update();
}

function pressed(event) {
  const typing = event.target.closest("input, select, textarea, dialog[open]");
  if (event.key === "Escape" && typing) event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = {
    "[": () => besideRun(-1), "]": () => besideRun(1), t: nextTheme, "?": () => document.getElementById("keys").showModal(),
    j: () => moveRow(1), k: () => moveRow(-1), x: toggleAxis, "/": () => root.querySelector("input[type=search]")?.focus(),
    p: () => { state.paused = !state.paused; drawFrame(); }, Escape: () => { if (state.args.has("low")) context().set({ low: null, high: null }); },
  };
  const digit = "1234567890".indexOf(event.key);
  if (digit >= 0 && event.key.length === 1 && offered()[digit]) go(state.run, offered()[digit]);
  else if (keys[event.key]) keys[event.key]();
  else return;
  event.preventDefault();
}

// ---------------------------------------------------------------- start

async function start() {
  if (location.search) history.replaceState(null, "", location.pathname + location.hash); // the token is in the cookie now
  drawTheme();
  try {
    state.session = await api("/api/session");
  } catch (error) {
    root.replaceChildren(h("div", { class: "error" }, h("b", { text: error.message }), h("p", { text: error.hint || "" })));
    return;
  }
  document.getElementById("theme").addEventListener("click", nextTheme);
  document.getElementById("help").addEventListener("click", () => document.getElementById("keys").showModal());
  document.getElementById("run").addEventListener("change", (event) => go(event.target.value, state.panel));
  document.getElementById("stop").addEventListener("click", async () => {
    if (confirm(`Stop ${state.run}? \`rillflow resume\` goes on where it was.`)) await context().post("stop").catch((error) => alert(error.message));
  });
  addEventListener("hashchange", follow);
  addEventListener("keydown", pressed);
  addEventListener("visibilitychange", () => { if (!document.hidden && current().state === "running") update(); });
  await follow();
  let width = root.clientWidth;
  new ResizeObserver(() => { if (root.clientWidth !== width) { width = root.clientWidth; update(); } }).observe(root);
  setTimeout(tick, EVERY);
}

start();
