// Feedback, and the answers before and after it, side by side.
import { $, badge, el, keepFocus, number, plural, when } from "/dashboard/dom.js";
import { get } from "/dashboard/wire.js";
import { record } from "/dashboard/versions.js";

const SHOWN = 20;
const given = new Map(); // completion → what was asked and answered
const TONES = { queued: "warn", applied: "good", held: "warn", unused: "quiet", failed: "bad", cancelled: "quiet" };
let seen = new Set();

async function completion(f) {
  const key = `${f.completion}/${f.choice}`;
  if (!given.has(key)) given.set(key, await get(`/v1/chat/completions/${encodeURIComponent(f.completion)}?choice=${f.choice}`));
  return given.get(key);
}

export async function show(app) {
  const name = app.chosen;
  if (name === "base") { $("feedback-list").replaceChildren(el("p", { class: "none" }, "The base model does not learn; choose an adapter.")); return; }
  const list = (await get(`/v1/feedback?adapter=${encodeURIComponent(name)}&limit=${SHOWN}`)).data;
  const rows = await Promise.all(list.map(async (f) => {
    const [asked, made] = await Promise.all([completion(f).catch(() => null), f.version ? record(name, f.version).catch(() => null) : null]);
    return row(f, asked, made);
  }));
  if (app.chosen !== name) return;
  keepFocus($("feedback-list"), () => rows.length ? rows : [el("p", { class: "none" }, `There is no feedback on the answers of ${name} yet.`)]);
  seen = new Set(list.map((f) => f.id));
}

function row(f, asked, made) {
  const fresh = seen.size && !seen.has(f.id);
  const said = [f.thumbs ? `${f.thumbs === "up" ? "Good" : "Bad"} answer. ` : "", f.text ?? ""].join("");
  const question = asked?.messages.at(-1)?.content ?? "";
  const change = made?.answers?.find((a) => a.feedback === f.id) ?? made?.answers?.find((a) => a.prompt === question);
  const status = { queued: "waits", applied: `in version ${f.version}`, held: `in candidate ${f.version}`, unused: "not used", failed: "failed", cancelled: "cancelled" }[f.status];
  return el("article", { class: "change" + (fresh ? " new" : ""), "data-feedback": f.id },
    el("p", { class: "head" }, when(f.received), f.key ? ` by ${f.key}` : "", "\u2003", badge(TONES[f.status], status), f.note ? ` ${f.note}` : ""),
    said ? el("p", { class: "quote" }, `“${said.trim()}”`) : null,
    f.better ? el("p", { class: "quote" }, el("span", { class: "soft" }, "A better answer: "), f.better) : null,
    question ? el("p", { class: "soft" }, "Asked: ", el("span", { class: "said" }, question)) : null,
    change ? sides(change, made) : asked ? el("div", { class: "sides" }, side("answered", asked.text)) : null);
}

function sides(change, made) {
  const same = change.before === change.after;
  const { logprob_before: old = {}, logprob_after: now = {} } = made.metrics ?? {};
  const moved = Object.keys(old).filter((role) => role in now).map((role) => `${role} ${number(old[role])} → ${number(now[role])}`);
  return el("div", {},
    el("div", { class: "sides" },
      side(`before, version ${made.parent}`, change.before, "before"),
      side(`after, version ${made.number}${same ? ": the same words" : ""}`, change.after, "after")),
    same && moved.length ? el("p", { class: "note moved" }, `The words are the same; the mean log-probs per token moved: ${moved.join(", ")}.`) : null,
    el("p", { class: "note" }, `The most likely answers. Version ${made.number} learned from ${plural(made.feedback.length, "feedback")}.`));
}

const side = (title, text, kind = "") => el("div", { class: "side " + kind }, el("div", { class: "head" }, title), text ? el("div", { class: "completion" }, text) : el("p", { class: "none" }, "(nothing)"));
