// A line chart in SVG: axes, a legend, the values under the pointer or the arrow keys, and zooming by dragging.
import { h, s, number, duration } from "./dom.js";

const SMALLEST = 1e-2; // of a value: the smallest range of a chart, so that rounding errors look like none
const HEIGHT = 190, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 22;

export function chart(picture, { width, axis = "step", low = null, high = null, onzoom = null, height = HEIGHT }) {
  const lines = picture.lines.filter((line) => line.points.length);
  const box = h("div", { class: "chart" });
  const frame = scales(lines, picture.log, width, height, low, high);
  const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": spoken(picture, lines) });
  svg.append(...axes(frame, picture, axis), ...lines.flatMap((line, index) => drawn(line, index, frame)));
  box.append(svg);
  if (lines.length > 1 || (lines[0] && lines[0].marks)) box.append(legend(lines));
  reading(box, svg, lines, frame, picture, axis);
  if (onzoom) zooming(svg, frame, onzoom);
  return box;
}

export function legend(lines) {
  return h("div", { class: "legend" }, lines.map((line, index) => h("span", {}, h("i", { class: `f${index % 8}` }), line.name)));
}

function spoken(picture, lines) {
  const ends = lines.map((line) => `${line.name} ${number(line.points[line.points.length - 1][1], picture.unit)}`);
  return `${picture.title}: ${ends.join(", ")}. Arrow keys read its values.`;
}

function scales(lines, log, width, height, low, high) {
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const line of lines) {
    for (const [x, y] of line.points) {
      if (log && y <= 0) continue;
      x0 = Math.min(x0, x); x1 = Math.max(x1, x);
      y0 = Math.min(y0, y); y1 = Math.max(y1, y);
    }
  }
  if (low !== null && high !== null) { x0 = low; x1 = high; }
  if (!Number.isFinite(x0)) [x0, x1, y0, y1] = [0, 1, 0, 1];
  if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
  log = log && y0 > 0;
  const to = log ? Math.log10 : (value) => value;
  let [bottom, top] = [to(y0), to(y1)];
  const least = log ? 0 : SMALLEST * Math.max(Math.abs(bottom), Math.abs(top));
  if (top > bottom && top - bottom < least) [bottom, top] = [(bottom + top - least) / 2, (bottom + top + least) / 2];
  if (top === bottom) [bottom, top] = log ? [bottom - 1, top + 1] : [Math.min(bottom, 0), Math.max(top, 0) || 1];
  const room = (top - bottom) * 0.06;
  bottom -= room; top += room;
  if (!log && y0 >= 0 && bottom < 0) bottom = 0;
  const inner = width - LEFT - RIGHT, tall = height - TOP - BOTTOM;
  return {
    width, height, x0, x1, bottom, top, log,
    x: (value) => LEFT + ((value - x0) / (x1 - x0)) * inner,
    y: (value) => TOP + (1 - (to(value) - bottom) / (top - bottom)) * tall,
    back: (pixel) => x0 + ((pixel - LEFT) / inner) * (x1 - x0),
  };
}

function axes(frame, picture, axis) {
  const made = [];
  const across = ticks(frame.x0, frame.x1, Math.max(2, Math.floor(frame.width / 90)));
  for (const value of across) {
    if (axis === "step" && !Number.isInteger(value)) continue;
    const text = axis === "time" ? duration(value) : number(value);
    made.push(s("text", { x: frame.x(value), y: frame.height - 6, "text-anchor": "middle", text }));
  }
  const up = frame.log ? powers(frame.bottom, frame.top) : ticks(frame.bottom, frame.top, 4);
  for (const value of up) {
    const y = frame.y(value);
    made.push(s("line", { class: "grid", x1: LEFT, x2: frame.width - RIGHT, y1: y, y2: y }));
    made.push(s("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end", text: label(value, up, picture.unit === "share") }));
  }
  return made;
}

// A tick's text: with as many digits as it takes to tell it from the next.
function label(value, every, share) {
  const gap = (every.length > 1 ? every[1] - every[0] : Math.abs(value) || 1) * (share ? 100 : 1);
  const digits = Math.max(0, -Math.floor(Math.log10(gap) + 1e-9)), most = Math.max(...every.map(Math.abs)) * (share ? 100 : 1);
  if (digits > 4 || most >= 1e4) return number(value, share ? "share" : "");
  const text = (share ? 100 * value : value).toFixed(digits);
  return share ? `${text} %` : Number(text) === 0 ? "0" : text;
}

function powers(bottom, top) {
  const whole = ticks(bottom, top, 4).filter((power) => Number.isInteger(power)).map((power) => 10 ** power);
  return whole.length > 1 ? whole : ticks(10 ** bottom, 10 ** top, 3).filter((value) => value > 0);
}

export function ticks(low, high, wanted) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= 0.7 * rough) || rough;
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) found.push(Number((index * step).toPrecision(12)));
  return found;
}

function drawn(line, index, frame) {
  const seen = line.points.filter(([, y]) => !frame.log || y > 0);
  const path = seen.map(([x, y], at) => `${at ? "L" : "M"}${frame.x(x).toFixed(1)} ${frame.y(y).toFixed(1)}`).join("");
  const made = [s("path", { class: `curve s${index % 8} ${line.marks || line.dashed ? "dashed" : ""}`, d: path })];
  if (line.marks || seen.length === 1) {
    for (const [x, y] of seen.slice(0, 400)) made.push(s("circle", { class: `f${index % 8}`, cx: frame.x(x), cy: frame.y(y), r: 3 }));
  }
  return made;
}

function reading(box, svg, lines, frame, picture, axis) {
  const cross = s("line", { class: "cross", y1: TOP, y2: frame.height - BOTTOM, visibility: "hidden" });
  const tip = h("div", { class: "tip", hidden: true });
  svg.append(cross);
  box.append(tip);
  const places = [...new Set(lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
  let at = -1;
  function show(x) {
    cross.setAttribute("x1", frame.x(x)); cross.setAttribute("x2", frame.x(x)); cross.setAttribute("visibility", "visible");
    const rows = lines.slice(0, 10).map((line, index) => {
      const near = nearest(line.points, x);
      return h("div", {}, h("i", { class: `f${index % 8} dot` }), `${line.name}: ${number(near[1], picture.unit)}`);
    });
    tip.replaceChildren(h("b", { text: axis === "time" ? duration(x) : `step ${number(x)}` }), ...rows);
    tip.hidden = false;
    const left = frame.x(x) > frame.width / 2 ? frame.x(x) - tip.offsetWidth - 10 : frame.x(x) + 10;
    tip.style.left = `${Math.max(0, left)}px`;
    tip.style.top = "6px";
  }
  function hide() { cross.setAttribute("visibility", "hidden"); tip.hidden = true; }
  svg.addEventListener("pointermove", (event) => {
    if (!places.length) return;
    at = closest(places, frame.back(event.clientX - svg.getBoundingClientRect().left));
    show(places[at]);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || !places.length) return;
    event.preventDefault();
    at = Math.min(Math.max((at < 0 ? places.length - 1 : at) + by, 0), places.length - 1);
    show(places[at]);
  });
}

function closest(places, x) {
  let best = 0;
  for (let index = 1; index < places.length; index += 1) if (Math.abs(places[index] - x) < Math.abs(places[best] - x)) best = index;
  return best;
}

function nearest(points, x) {
  return points[closest(points.map(([at]) => at), x)];
}

// Calls `onzoom(low, high)` for what was dragged over, `onzoom(null, null)` for a double click.
export function zooming(svg, frame, onzoom) {
  let from = null, shade = null;
  const place = (event) => event.clientX - svg.getBoundingClientRect().left;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    from = place(event);
    shade = s("rect", { class: "pick", y: 0, height: frame.height, x: from, width: 0 });
    svg.append(shade);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const to = place(event);
    shade.setAttribute("x", Math.min(from, to)); shade.setAttribute("width", Math.abs(to - from));
  });
  svg.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const [a, b] = [from, place(event)].sort((one, other) => one - other);
    from = null; shade.remove();
    if (b - a > 6) onzoom(frame.back(a), frame.back(b));
  });
  svg.addEventListener("dblclick", () => onzoom(null, null));
}
