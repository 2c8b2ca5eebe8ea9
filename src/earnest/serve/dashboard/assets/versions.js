// Versions of the chosen adapter: which one answers, the verdicts of gate and audit, and the buttons.
import { $, badge, el, findings, keepFocus, number, plural, when } from "/dashboard/dom.js";
import { chart } from "/dashboard/chart.js";
import { at, blob, get, post } from "/dashboard/wire.js";

const DETAILED = 20; // versions whose records are read for curves
const records = new Map(); // "name@number" → record; a version never changes
let steps = []; // the losses of the update under way
let seen = new Set();

export async function record(name, version) {
  const key = `${name}@${version}`;
  if (!records.has(key)) records.set(key, await get(`${at(name)}/versions/${version}`));
  return records.get(key);
}

export async function show(app) {
  const name = app.chosen;
  const adapter = app.adapters.find((a) => a.name === name);
  $("versions-title").textContent = name === "base" ? "Versions" : `Versions of ${name}`;
  if (!adapter) {
    $("version-curves").replaceChildren();
    $("version-list").replaceChildren(el("p", { class: "none" }, "The base model has no versions; choose an adapter."));
    return;
  }
  const list = (await get(`${at(name)}/versions`)).data;
  const known = await Promise.all(list.slice(-DETAILED).map((v) => record(name, v.number)));
  if (app.chosen !== name) return;
  const details = new Map(known.map((r) => [r.number, r]));
  keepFocus($("version-curves"), () => curves(known));
  keepFocus($("version-list"), () => [...list].reverse().map((v) => row(app, adapter, v, details.get(v.number))).concat(base(app, adapter)));
  seen = new Set(list.map((v) => `${name}@${v.number}`));
}

function curves(known) {
  const line = (title, read, label = title) => {
    const points = known.map((r) => [r.number, read(r)]).filter(([, y]) => Number.isFinite(y));
    if (points.length < 2) return null;
    return chart({ title, unit: "version", series: [{ label, colour: 0, x: points.map((p) => p[0]), y: points.map((p) => p[1]) }] });
  };
  const gate = (key) => (r) => r.metrics.gate?.[key];
  return [
    line("loss after the update", (r) => r.metrics.loss, "loss"),
    line("held-out margin, nats", gate("margin"), "margin"),
    line("entropy, relative to the base's", gate("entropy_ratio"), "entropy ratio"),
    line("drift from the base, nats per token", gate("drift"), "drift"),
  ].filter(Boolean);
}

function row(app, adapter, v, r) {
  const name = adapter.name;
  const fresh = seen.size && !seen.has(`${name}@${v.number}`);
  const facts = [
    v.live ? badge("good", adapter.pinned ? "answers now, pinned" : "answers now") : badge(v.status === "promoted" ? "quiet" : "warn", v.status === "promoted" ? "promoted before" : "candidate"),
    verdict("gate", v.gate), verdict("audit", v.audit),
    el("span", { class: "soft" }, v.feedback.length ? plural(v.feedback.length, "feedback") : "no feedback", `, loss ${number(v.loss)}, from version ${v.parent}, ${when(v.created)}`),
  ];
  return el("article", { class: "version" + (fresh ? " new" : ""), "data-version": v.number, "aria-label": `Version ${v.number}` },
    el("div", { class: "top" }, el("b", {}, `Version ${v.number}`), facts),
    v.reason ? el("p", { class: "why" }, "Not promoted by itself: ", v.reason) : null,
    el("div", { class: "row" }, buttons(app, adapter, v)),
    r ? inside(name, r) : null);
}

const verdict = (what, holds) => holds === null || holds === undefined ? badge("quiet", `${what} not run`) : badge(holds ? "good" : "bad", `${what} ${holds ? "holds" : "fails"}`);

function buttons(app, adapter, v) {
  const name = adapter.name;
  const act = (label, path, body, key) => el("button", { type: "button", "data-key": `${key}-${v.number}`, "aria-label": `${label} (version ${v.number})`, onclick: () => app.act(post(`${at(name)}/${path}`, body)) }, label);
  const found = [];
  if (v.live && adapter.pinned) found.push(act("Unpin", "pin", { version: null }, "pin"));
  if (v.live && !adapter.pinned) found.push(act("Pin", "pin", { version: v.number }, "pin"));
  if (!v.live && v.status !== "promoted") found.push(act("Promote anyway", "promote", { version: v.number }, "live"));
  else if (!v.live) found.push(v.number < adapter.live ? act("Roll back to this", "rollback", { version: v.number }, "live") : act("Make it live again", "promote", { version: v.number }, "live"));
  if (v.number > 0) found.push(el("button", { type: "button", "data-key": `export-${v.number}`, "aria-label": `Export (version ${v.number})`, onclick: () => app.act(save(name, v.number)) }, "Export"));
  found.push(el("button", { type: "button", "data-key": `fork-${v.number}`, "aria-label": `Fork (version ${v.number})`, onclick: () => {
    const fresh = prompt(`A name for the new adapter that starts from version ${v.number} of ${name}:`);
    if (fresh) app.act(post(`${at(name)}/fork`, { name: fresh.trim(), version: v.number }));
  } }, "Fork"));
  return found;
}

async function save(name, number) {
  const link = el("a", { href: URL.createObjectURL(await blob(`${at(name)}/versions/${number}/export`)), download: `${name.replace("/", "-")}-v${number}.zip` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function inside(name, r) {
  const steps = r.curve ?? [];
  const own = chart({ title: `loss of version ${r.number}`, series: [{ label: "loss", colour: 0, x: steps.map((_, i) => i + 1), y: steps.map((s) => s.loss) }] });
  const failed = (verdict) => verdict.findings.filter((f) => f.outcome === "fails").length;
  const skipped = (verdict) => {
    const names = verdict.findings.filter((f) => f.outcome === "not applicable").map((f) => f.law === "gate" ? f.subject : `${f.law} · ${f.subject}`);
    return names.length ? `, ${names.length} not applicable${names.length > 3 ? "" : ` (${names.join(", ")})`}` : "";
  };
  const table = (title, found) => found.findings?.length ? el("details", { "data-key": `${title}-${name}-${r.number}`, open: failed(found) > 0 }, el("summary", {}, `${title}: ${plural(found.findings.length, "check")}, ${failed(found)} failed${skipped(found)}`), findings(found.findings)) : null;
  return el("div", {},
    r.notes?.length ? el("p", { class: "note" }, `${r.notes.join("; ")}.`) : null,
    table("gate", r.gate), table("audit", r.audit),
    own ? el("details", { "data-key": `curve-${name}-${r.number}` }, el("summary", {}, "loss, step by step"), own) : null);
}

function base(app, adapter) {
  const live = adapter.live === 0;
  return el("article", { class: "version", "data-version": "0", "aria-label": "Version 0" },
    el("div", { class: "top" }, el("b", {}, "Version 0"), live ? badge("good", adapter.pinned ? "answers now, pinned" : "answers now") : badge("quiet", "the base"), el("span", { class: "soft" }, "the base model, as it was")),
    el("div", { class: "row" }, buttons(app, adapter, { number: 0, live, status: "promoted" })));
}

export function learning(app, data) {
  // The update under way, as it goes.
  if (data.adapter !== app.chosen) return;
  if (data.phase === "begins") steps = [];
  if (data.phase === "step") steps.push(data.loss);
  const words = {
    begins: "is being made", audit: "is being audited", gate: "is being checked by the gate",
    step: `learns, step ${data.step} of ${data.of}, loss ${number(data.loss)}`, waiting: `waits: ${data.reason}`,
  };
  const now = chart({ title: `loss of version ${data.version}, now`, series: [{ label: "loss", colour: 0, x: steps.map((_, i) => i + 1), y: steps }] });
  $("live-curve").replaceChildren(...(now ? [now] : []));
  $("learning").textContent = words[data.phase] ? `Version ${data.version ?? ""} ${words[data.phase]}.` : "";
}

export function settled() {
  $("learning").textContent = "";
  $("live-curve").replaceChildren();
  steps = [];
}
