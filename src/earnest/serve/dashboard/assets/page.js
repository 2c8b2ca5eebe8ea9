// The page: loads everything once, then follows the events.
import { $, badge, clock, el, keepFocus, plural } from "/dashboard/dom.js";
import { at, get, hasKey, post, remove, useKey, watch } from "/dashboard/wire.js";
import * as chat from "/dashboard/chat.js";
import * as feedback from "/dashboard/feedback.js";
import * as runs from "/dashboard/runs.js";
import * as versions from "/dashboard/versions.js";

const LINES = 80;
const app = {
  adapters: [],
  chosen: "base",
  fail(error) {
    $("error").textContent = error.message;
    $("error").hidden = false;
    if (error.status === 401) ask(error);
  },
  async act(promise, reload = true) {
    // After a click: wait for the result, show an error, and load the new state.
    try { await promise; $("error").hidden = true; if (reload) refresh("adapters"); } catch (error) { app.fail(error); }
  },
  choose(name) {
    app.chosen = name;
    $("adapter").value = name;
    versions.settled();
    refresh("adapters");
  },
};

// ── what is shown ────────────────────────────────────────────────────────────────────────────────────────────────
async function adapters() {
  const before = new Set(app.adapters.map((a) => a.name));
  app.adapters = (await get("/v1/adapters")).data;
  const names = [...app.adapters.map((a) => a.name), "base"];
  if (!names.includes(app.chosen) || (!before.size && app.chosen === "base")) app.chosen = names[0];
  const select = $("adapter");
  if (select.options.length !== names.length || names.some((n, i) => select.options[i].value !== n)) select.replaceChildren(...names.map((n) => el("option", { value: n }, n)));
  select.value = app.chosen;
  keepFocus($("adapter-rows"), () => app.adapters.map(line));
  facts();
  await Promise.all([versions.show(app), feedback.show(app)]);
}

function line(a) {
  const waiting = a.feedback.queued ? `, ${a.feedback.queued} waiting` : "";
  const held = a.feedback.held ? `, ${a.feedback.held} in candidates` : "";
  const failed = a.feedback.failed ? `, ${a.feedback.failed} failed` : "";
  return el("tr", { class: a.name === app.chosen ? "chosen" : null, "data-adapter": a.name },
    el("th", { scope: "row" }, a.name, a.origin ? el("span", { class: "soft" }, ` from ${a.origin}`) : null),
    el("td", {}, `version ${a.live}`, a.pinned ? ", pinned" : ""),
    el("td", {}, String(a.versions.length)),
    el("td", {}, `${a.feedback.applied} learned from${held}${waiting}${failed} `, a.set_aside ? badge("bad", "learning set aside") : null),
    el("td", {}, el("div", { class: "row" }, el("button", { type: "button", "data-key": "show-" + a.name, "aria-pressed": String(a.name === app.chosen), "aria-label": `Show ${a.name}`, onclick: () => app.choose(a.name) }, "Show"),
      a.set_aside ? el("button", { type: "button", "data-key": "resume-" + a.name, title: a.set_aside, "aria-label": `Resume ${a.name}`, onclick: () => app.act(post(`${at(a.name)}/resume`, {})) }, "Resume") : null,
      el("button", { type: "button", "data-key": "delete-" + a.name, "aria-label": `Delete ${a.name}`, onclick: () => { if (confirm(`Delete ${a.name}, its versions and its feedback?`)) app.act(remove(at(a.name))); } }, "Delete"))));
}

function facts() {
  const sum = (key) => app.adapters.reduce((total, a) => total + a.feedback[key], 0);
  const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));
  $("facts").replaceChildren(
    fact("adapters", String(app.adapters.length)),
    fact("versions", String(app.adapters.reduce((total, a) => total + a.versions.length, 0))),
    fact("feedback", [`${sum("applied")} learned from, ${sum("queued")} waiting `, sum("failed") ? badge("bad", `${sum("failed")} failed`) : null]));
}

async function health() {
  const found = await get("/health");
  const tone = { ok: "good", loading: "warn", failed: "bad" }[found.status] ?? "quiet";
  const rows = [["status", badge(tone, found.status)], ["earnest", found.version]];
  if (found.model) {
    $("title").textContent = found.model.split(" (")[0];
    rows.push(["model", found.model]);
  } else $("title").textContent = found.status === "loading" ? "The model is being loaded" : "A model that learns";
  if (found.chat) rows.push(["chat", Object.entries(found.chat).map(([k, v]) => `${k} ${v}`).join(", ")]);
  if (found.waiting) rows.push(["waiting for a turn", Object.entries(found.waiting).map(([k, v]) => `${k} ${v}`).join(", ")]);
  if (found.attached !== undefined) rows.push(["versions in memory", String(found.attached)]);
  if ("learning" in found) rows.push(["learning", found.learning ? `${found.learning.adapter}, version ${found.learning.version}: ${found.learning.phase}` : "nothing at the moment"]);
  if (found.storage) rows.push(["storage", badge("bad", found.storage)]);
  if (found.set_aside) rows.push(["learning set aside", badge("bad", plural(found.set_aside, "adapter"))]);
  if (found.failed_feedback) rows.push(["feedback that failed", badge("bad", String(found.failed_feedback))]);
  if (hasKey()) rows.push(["API key", el("button", { type: "button", "data-key": "forget", onclick: () => { useKey(null); location.reload(); } }, "Forget the key")]);
  keepFocus($("health-list"), () => rows.map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v))));
  if (found.status === "loading") setTimeout(() => refresh("health"), 1000);
}

const parts = { adapters, health, runs: () => runs.show(app) };
const wanted = new Set();
let working = false;

async function refresh(...names) {
  // One at a time, and once for many requests: events may come faster than answers.
  for (const name of names) wanted.add(name);
  if (working) return;
  working = true;
  try {
    while (wanted.size) {
      const [name] = wanted;
      wanted.delete(name);
      try { await parts[name](); } catch (error) { app.fail(error); if (error.status === 401) break; }
    }
  } finally { working = false; }
}

// ── what happens ─────────────────────────────────────────────────────────────────────────────────────────────────
function told(event, data) {
  if (event in parts && event !== "adapters") return refresh(event); // runs, health: something changed
  const about = data.adapter ?? "";
  const words = {
    feedback: () => `feedback on ${about}: ${data.text ?? data.better ?? "thumbs " + data.thumbs}`,
    learn: () => `${about}${data.version ? ", version " + data.version : ""}: ${data.phase}${data.step ? ` ${data.step} of ${data.of}` : ""}${data.reason ? ` (${data.reason})` : ""}`,
    version: () => `${about} has a version ${data.number}: ${data.status}${data.reason ? `, ${data.reason}` : ""}`,
    adapter: () => `${about}: ${data.what}`,
  }[event];
  note(event === "adapter" && ["pushed", "unloaded"].includes(data.what) ? `adapters were pushed and unloaded; the latest: ${words()}` : words ? words() : event, data);
  while ($("events").children.length > LINES) $("events").lastChild.remove();
  chat.told(event, data);
  if (event === "learn") {
    versions.learning(app, data);
    if (!["step", "audit", "gate"].includes(data.phase)) refresh("adapters", "health");
  } else {
    if (event === "version" && about === app.chosen) versions.settled();
    refresh("adapters", "health");
  }
}

function note(text, data) {
  // A sampler's pushes come with every step of a run: one line with their number.
  const folds = data.what === "pushed" || data.what === "unloaded";
  const first = $("events").firstElementChild;
  const count = folds && first?.dataset.folds ? Number(first.dataset.folds) + 1 : 1;
  if (count > 1) first.remove();
  $("events").prepend(el("li", { "data-folds": folds ? count : null }, el("time", {}, clock(data.time)), text, count > 1 ? ` (${count} events)` : ""));
}

function state(name, error) {
  const live = name === "live";
  $("live").className = "badge " + (live ? "good" : "bad");
  $("live").textContent = live ? "live" : "not connected";
  if (live) refresh("adapters", "health", "runs");
  else if (error?.status === 401) ask(error);
}

// ── keys and looks ───────────────────────────────────────────────────────────────────────────────────────────────
function ask(error) {
  $("door").hidden = false;
  $("board").hidden = true;
  $("error").hidden = true;
  if (hasKey()) $("door-note").textContent = error.message;
  useKey(null);
  $("key").focus();
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value.trim());
  $("key").value = "";
  open();
});
$("adapter").addEventListener("change", () => app.choose($("adapter").value));
$("make").addEventListener("submit", async (event) => {
  event.preventDefault();
  const name = $("name").value.trim();
  await app.act(post("/v1/adapters", { name }).then(() => { $("name").value = ""; app.chosen = name; }));
});

const themes = ["auto", "light", "dark"];
const kept = (value) => { try { return value === undefined ? localStorage.getItem("earnest-theme") : localStorage.setItem("earnest-theme", value); } catch { return null; } };
function dress(name) {
  if (name === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
  $("theme").textContent = "theme: " + name;
}
let theme = themes.includes(kept()) ? kept() : "auto";
dress(theme);
$("theme").addEventListener("click", () => { theme = themes[(themes.indexOf(theme) + 1) % 3]; kept(theme); dress(theme); });

async function open() {
  try { await get("/v1/adapters"); } catch (error) {
    if (error.status === 401) return ask(error);
    app.fail(error);
  }
  $("door").hidden = true;
  $("board").hidden = false;
  watch(told, state);
}

chat.setup(app);
refresh("health");
open();
