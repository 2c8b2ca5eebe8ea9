// Elements, numbers and times. Text goes in as text: nothing here or elsewhere parses markup.
export const $ = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}

const minus = (text) => text.replaceAll("-", "−");

export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e7 || size < 1e-4) {
    const [mantissa, exponent] = value.toExponential(2).split("e");
    return minus(Number(mantissa) + "e" + Number(exponent));
  }
  return minus(Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 8 }));
}

export const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

export function when(seconds) {
  const date = new Date(1000 * seconds);
  const today = date.toDateString() === new Date().toDateString();
  return today ? clock(seconds) : date.toLocaleDateString([], { month: "short", day: "numeric" }) + " " + clock(seconds);
}

export const badge = (kind, text) => el("span", { class: "badge " + kind }, text);

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

export function findings(list) {
  // Rows of a verdict: what was measured, what was expected, what a failure means.
  const tones = { holds: "good", fails: "bad", warns: "warn" };
  const rows = list.map((f) => el("tr", {},
    el("th", { scope: "row" }, f.law === "gate" ? f.subject : `${f.law} · ${f.subject}`),
    el("td", {}, f.measured, f.expected ? el("span", { class: "soft" }, ` (expected: ${f.expected})`) : null,
      tones[f.outcome] && f.meaning ? el("div", { class: "soft" }, f.meaning) : null),
    el("td", {}, badge(tones[f.outcome] ?? "quiet", f.outcome))));
  return el("table", { class: "findings" }, el("thead", {}, el("tr", {}, ...["what", "measured", "verdict"].map((t) => el("th", { scope: "col" }, t)))), el("tbody", {}, rows));
}

export function keepFocus(box, build) {
  // Redraw a box without taking the keyboard away from the control in it that has a data-key.
  const held = box.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const open = new Set([...box.querySelectorAll("details[open][data-key]")].map((d) => d.dataset.key));
  box.replaceChildren(...build());
  for (const d of box.querySelectorAll("details[data-key]")) if (open.has(d.dataset.key)) d.open = true;
  if (held) [...box.querySelectorAll("[data-key]")].find((n) => n.dataset.key === held)?.focus();
}
