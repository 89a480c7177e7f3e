// A lane for each worker: what it did when, and the share of the time that it was idle.
import { h, s, number, duration, empty } from "./dom.js";
import { ticks, zooming } from "./chart.js";

export const title = "Timeline";
const ROW = 30, TOP = 6, BOTTOM = 22;

export function mount(root, context) {
  const top = h("div"), picture = h("section", { class: "card" });
  root.append(h("div", { class: "head" }, h("h1", { text: title }), top), picture);
  return {
    async update() {
      const { get, args, set } = context();
      const zoom = { low: args.get("low"), high: args.get("high") };
      const inner = Math.max(picture.clientWidth - 34, 240);
      const left = inner < 600 ? 0 : 190;
      const data = await get("timeline", { ...zoom, width: Math.max(Math.floor(inner - left), 50) });
      if (!picture.isConnected) return;
      top.replaceChildren(...(zoom.low ? [h("button", { text: "Show all (Esc)", onclick: () => set({ low: null, high: null }) })] : []));
      if (!data.lanes.length) { picture.replaceChildren(empty("Nobody has done anything yet: lanes begin with the first worker.")); return; }
      picture.replaceChildren(lanes(data, inner, left, set), legend(data), shares(data),
        data.left_out ? h("p", { class: "soft", text: `${data.left_out} more workers are not drawn` }) : "");
    },
  };
}

function lanes(data, width, left, set) {
  const row = left ? ROW : ROW + 16, height = TOP + data.lanes.length * row + BOTTOM;
  const span = data.high - data.low || 1;
  const x = (value) => left + ((value - data.low) / span) * (width - left);
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Timeline of ${data.lanes.length} workers` });
  data.lanes.forEach((lane, index) => {
    const y = TOP + index * row + (left ? 4 : 18);
    const idle = `${number(lane.shares.idle || 0, "share")} idle`;
    svg.append(s("text", { class: "strong", x: 0, y: left ? y + 14 : y - 5, text: left ? lane.worker.slice(0, 24) : `${lane.worker}: ${idle}` }));
    if (left) svg.append(s("text", { x: left - 8, y: y + 14, "text-anchor": "end", text: idle }));
    svg.append(s("rect", { class: "state-idle", x: left, y, width: width - left, height: 20 }));
    for (const [state, begin, end] of lane.bars) {
      if (state === "idle") continue;
      const bar = s("rect", { class: `state-${state}`, x: x(begin).toFixed(2), y, width: Math.max(x(end) - x(begin), 0.4).toFixed(2), height: 20 });
      bar.append(s("title", { text: `${lane.worker}: ${state}, ${duration(end - begin)} from ${duration(begin)}` }));
      svg.append(bar);
    }
  });
  for (const value of ticks(data.low, data.high, Math.max(2, Math.floor((width - left) / 110)))) {
    const anchor = x(value) < 20 ? "start" : x(value) > width - 20 ? "end" : "middle";
    svg.append(s("text", { x: x(value), y: height - 6, "text-anchor": anchor, text: value ? duration(value) : "0" }));
  }
  zooming(svg, { height, back: (pixel) => data.low + ((pixel - left) / (width - left)) * span }, (low, high) => set({ low: low === null ? null : Math.max(low, 0), high }));
  return h("div", { class: "chart" }, svg);
}

function legend(data) {
  return h("div", { class: "legend" }, data.states.map((state) => h("span", {}, h("i", { class: `state-${state}` }), state)), h("span", { text: "drag to zoom" }));
}

function shares(data) {
  const head = h("tr", {}, h("th", { text: "worker" }), data.states.map((state) => h("th", { class: "number", text: state })));
  const rows = data.lanes.map((lane) => h("tr", {}, h("td", { text: lane.worker }), data.states.map((state) => h("td", { class: "number", text: number(lane.shares[state] || 0, "share") }))));
  return h("div", { class: "scroll" }, h("table", { "aria-label": "Share of each state" }, h("thead", {}, head), h("tbody", {}, rows)));
}
