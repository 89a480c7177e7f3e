// Errors of the user's code with their tracebacks, and the logs of all processes.
import { h, bytes, number, select, delayed, empty } from "./dom.js";
import { keepOpen } from "./overview.js";

export const title = "Logs";
const LEVELS = [["DEBUG", "all"], ["INFO", "info"], ["WARNING", "warnings"], ["ERROR", "errors"]];

export function mount(root, context) {
  const errors = h("div"), choosing = h("span", { class: "toolbar" }), lines = h("div", { class: "log mono", tabindex: 0, "aria-label": "Log" });
  const search = h("input", { type: "search", placeholder: "Find in the log", "aria-label": "Find in the log" });
  search.value = context().args.get("find") || "";
  search.addEventListener("input", delayed(() => context().set({ find: search.value })));
  root.append(h("div", { class: "head" }, h("h1", { text: title })), errors, h("section", { class: "card" }, h("div", { class: "toolbar" }, choosing, search), lines));
  return {
    async update() {
      const { get, args, set } = context();
      const data = await get("logs");
      keepOpen(errors, [...data.user_errors.map(userError), ...failures(data.failures)]);
      if (!data.files.length) { lines.replaceChildren(empty("No process has written a log yet.")); return; }
      const name = args.get("name") || (data.files.find((file) => file.bytes) || data.files[0]).name, level = args.get("level") || "DEBUG";
      const choices = data.files.map((file) => [file.name, `${file.name} (${bytes(file.bytes)}${file.errors ? `, ${file.errors} errors` : ""}${file.warnings ? `, ${file.warnings} warnings` : ""})`]);
      if (!choosing.contains(document.activeElement)) {
        choosing.replaceChildren(select("process", name, choices, (chosen) => set({ name: chosen })), select("show", level, LEVELS, (chosen) => set({ level: chosen })));
      }
      const log = await get("log", { name, level, find: args.get("find") });
      const end = lines.scrollHeight - lines.scrollTop - lines.clientHeight < 40 || !lines.childElementCount;
      lines.replaceChildren(...(log.lines.length ? log.lines.map(([of, text]) => h("div", { class: of, text })) : [empty(args.get("find") || level !== "DEBUG" ? "No line matches." : "This log is empty.")]));
      if (end) lines.scrollTop = lines.scrollHeight;
    },
  };
}

function userError(error) {
  return h("details", { class: "advice problem", "data-key": error.kind + error.where },
    h("summary", {}, h("b", { text: `${error.kind}, ${error.count === 1 ? "once" : `${number(error.count)} times`}: ` }), error.error), h("pre", { text: error.trace || `at ${error.where}` }));
}

function failures(found) {
  if (!found.length) return [];
  return [h("details", { class: "advice warning", "data-key": "failures" }, h("summary", { text: `The last ${found.length} episodes that failed after all attempts` }),
    h("pre", { text: found.map((one) => `${one.task} on ${one.node || "?"}: ${one.cause}${one.error ? `\n${one.error}` : ""}`).join("\n\n") }))];
}
