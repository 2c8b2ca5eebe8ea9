// A small line chart, drawn by hand in the report's look: an image with a sentence, and its numbers as a table.
import { el, number } from "/dashboard/dom.js";

const NS = "http://www.w3.org/2000/svg";
const HEIGHT = 132, TOP = 8, BOTTOM = HEIGHT - 22;

function svg(tag, attributes, parent, text) {
  const node = document.createElementNS(NS, tag);
  for (const name in attributes) node.setAttribute(name, attributes[name]);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function ticks(low, high) {
  const raw = (high - low) / 3;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(10)));
  return found;
}

function draw(box, chart) {
  const width = box.clientWidth;
  if (!width) return;
  const values = chart.series.flatMap((s) => [...s.y, ...(s.lo ?? []), ...(s.hi ?? [])]);
  let low = Math.min(...values, chart.floor ?? Infinity), high = Math.max(...values, chart.ceiling ?? -Infinity);
  if (low === high) { const room = Math.abs(low) * 0.1 || 1; low -= room; high += room; }
  const xs = chart.series.flatMap((s) => s.x);
  let first = Math.min(...xs), last = Math.max(...xs);
  const alone = first === last;
  if (alone) { first -= 1; last += 1; }
  const marks = ticks(low, high), names = marks.map(number);
  const left = 8 + 6.6 * Math.max(...names.map((n) => n.length)), right = 12;
  const px = (x) => left + ((x - first) / (last - first)) * (width - left - right);
  const py = (y) => BOTTOM - ((y - low) / (high - low)) * (BOTTOM - TOP);
  box.replaceChildren();
  const root = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, "aria-hidden": "true", focusable: "false" }, box);
  marks.forEach((mark, i) => {
    svg("line", { class: "gridline", x1: left, x2: width - right, y1: py(mark).toFixed(1), y2: py(mark).toFixed(1) }, root);
    svg("text", { x: left - 7, y: (py(mark) + 4).toFixed(1), "text-anchor": "end" }, root, names[i]);
  });
  svg("line", { class: "axis", x1: left, x2: width - right, y1: BOTTOM, y2: BOTTOM }, root);
  const ends = alone ? [[first + 1, "middle"]] : [[first, "start"], [last, "end"]];
  ends.forEach(([x, anchor], i) => svg("text", { x: px(x).toFixed(1), y: HEIGHT - 6, "text-anchor": anchor }, root, (i ? "" : chart.unit + " ") + number(x)));
  for (const one of chart.series) {
    const group = svg("g", { class: one.colour < 0 ? "sn" : "s" + (one.colour % 6) }, root);
    const path = one.x.map((x, i) => (i ? "L" : "M") + px(x).toFixed(1) + "," + py(one.y[i]).toFixed(1)).join("");
    svg("path", { class: one.style === "faint" ? "curve faint" : "curve", d: path }, group);
    if (one.x.length <= 24) one.x.forEach((x, i) => svg("circle", { class: "dot", cx: px(x).toFixed(1), cy: py(one.y[i]).toFixed(1), r: 3.4 }, group));
  }
}

const drawn = new Map();
const watcher = new ResizeObserver((entries) => { for (const { target } of entries) if (drawn.has(target)) draw(target, drawn.get(target)); });

export function chart(wanted) {
  // {title, unit, series: [{label, x, y, colour}], floor?, ceiling?, note?} → a figure.
  const one = { unit: "step", ...wanted, series: wanted.series.filter((s) => s.x.length) };
  if (!one.series.length) return null;
  const shown = one.series.filter((s) => s.style !== "faint");
  const ends = shown.map((s) => `${s.label} ${number(s.y[0])} → ${number(s.y[s.y.length - 1])}`).join(", ");
  const box = el("div", { class: "plot", role: "img", "aria-label": `${one.title}: ${ends}`, "data-chart": one.title });
  const legend = shown.map((s) => el("span", { class: s.colour < 0 ? "sn" : "c" + (s.colour % 6) }, shown.length > 1 ? el("span", { class: "key" }) : null, shown.length > 1 ? s.label + " " : "", el("b", {}, number(s.y[s.y.length - 1])), "\u2003"));
  const steps = [...new Set(shown.flatMap((s) => s.x))].sort((a, b) => a - b);
  const table = el("details", { class: "data" }, el("summary", {}, "numbers"), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `${one.title}: numbers` },
    el("table", { class: "numbers" }, el("thead", {}, el("tr", {}, el("th", {}, one.unit), ...shown.map((s) => el("th", {}, s.label)))),
      el("tbody", {}, steps.slice(-40).map((x) => el("tr", {}, el("th", { scope: "row" }, number(x)), ...shown.map((s) => el("td", {}, number(s.y[s.x.indexOf(x)])))))))));
  drawn.set(box, one);
  watcher.observe(box);
  for (const old of drawn.keys()) if (old !== box && !old.isConnected && drawn.size > 200) { watcher.unobserve(old); drawn.delete(old); }
  return el("figure", { class: "small" }, el("figcaption", {}, el("span", { class: "name" }, one.title), el("span", { class: "readout" }, legend)), box, table);
}
