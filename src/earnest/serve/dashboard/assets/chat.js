// The conversation: answers as they come, the users' feedback on them, and its status.
import { $, el, plural } from "/dashboard/dom.js";
import { chat, post } from "/dashboard/wire.js";

let messages = [];
let busy = null;
const quiet = $("quiet"); // the text of an empty conversation
const fates = new Map(); // feedback id → the line under its answer

export function setup(app) {
  $("fresh").addEventListener("click", () => {
    busy?.abort();
    messages = [];
    $("log").replaceChildren(quiet);
    $("words").focus();
  });
  $("words").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("ask").requestSubmit(); }
  });
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("words").value.trim();
    if (text && !busy) ask(app, text);
  });
}

function turn(who, text, kind = "") {
  const said = el("p", { class: "said" }, text);
  const head = el("p", { class: "who" }, who);
  const box = el("div", { class: "turn " + kind }, head, said);
  if (quiet.isConnected) $("log").replaceChildren();
  $("log").append(box);
  $("log").scrollTop = $("log").scrollHeight;
  return { box, said, head };
}

async function ask(app, text) {
  const model = app.chosen;
  const asked = turn("you", text);
  const shown = turn(model, "", "answer");
  shown.box.setAttribute("aria-busy", "true");
  $("words").value = $("refusal").textContent = "";
  $("send").disabled = true;
  busy = new AbortController();
  let id = null, answer = "";
  try {
    const system = $("system").value.trim();
    const front = system ? [{ role: "system", content: system }] : [];
    await chat({ model, temperature: Number($("temperature").value), messages: [...front, ...messages, { role: "user", content: text }] }, (chunk) => {
      id = chunk.id;
      answer += chunk.choices[0]?.delta?.content ?? "";
      shown.said.textContent = answer;
      shown.head.textContent = model === "base" ? "base" : `${model}, version ${chunk.adapter_version}`;
      $("log").scrollTop = $("log").scrollHeight;
    }, busy.signal);
    messages.push({ role: "user", content: text }, { role: "assistant", content: answer });
    shown.box.append(model === "base" ? el("p", { class: "fate" }, "The base model does not learn; choose an adapter to teach.") : reactions(app, id));
    $("log").scrollTop = $("log").scrollHeight;
  } catch (error) {
    if (error.name !== "AbortError") {
      app.fail(error);
      if (answer) shown.said.textContent = answer + " … " + error.message;
      else { // refused: the message goes back into the box, to be shortened or sent again
        asked.box.remove();
        shown.box.remove();
        if (!$("log").children.length) $("log").append(quiet);
        $("refusal").textContent = error.message;
        $("words").value = text;
        $("words").focus();
      }
    }
  } finally {
    shown.box.removeAttribute("aria-busy");
    busy = null;
    $("send").disabled = false;
  }
}

function reactions(app, id) {
  const fate = el("p", { class: "fate", role: "status" });
  const send = async (said, pressed) => {
    try {
      const told = await post("/v1/feedback", { completion_id: id, ...said });
      if (pressed) pressed.setAttribute("aria-pressed", "true");
      fates.set(told.id, fate);
      if (told.status === "queued") fate.textContent = "Stored. It waits to be learned from.";
      return true;
    } catch (error) { app.fail(error); return false; }
  };
  const thumb = (value, label) => {
    const button = el("button", { type: "button", "aria-pressed": "false", "data-thumb": value }, label);
    button.addEventListener("click", () => { if (button.getAttribute("aria-pressed") === "false") send({ thumbs: value }, button); });
    return button;
  };
  const number = id.slice(-8);
  const words = el("textarea", { rows: "1", id: "text-" + number, placeholder: "Warmer please." });
  const better = el("textarea", { rows: "1", id: "better-" + number });
  const form = el("form", { class: "more" },
    el("label", { for: words.id }, "What should be different?"), words,
    el("label", { for: better.id }, "A better answer"), better,
    el("div", { class: "row" }, el("button", { type: "submit" }, "Give feedback")));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const said = {};
    if (words.value.trim()) said.text = words.value.trim();
    if (better.value.trim()) said.better = better.value.trim();
    if (!Object.keys(said).length) { words.focus(); return; }
    if (await send(said)) { form.reset(); more.open = false; more.querySelector("summary").focus(); }
  });
  const more = el("details", {}, el("summary", {}, "Say more"), form);
  return el("div", { class: "react" }, el("div", { class: "row", role: "group", "aria-label": "Feedback on this answer" }, thumb("up", "Good answer"), thumb("down", "Bad answer"), more), fate);
}

export function told(event, data) {
  // Show under an answer whether a version learned from its feedback.
  const about = (data.feedback instanceof Array ? data.feedback : []).filter((id) => fates.has(id));
  for (const id of about) {
    const line = fates.get(id);
    if (event === "version") {
      line.textContent = data.status === "promoted"
        ? `Version ${data.number} learned from this and ${plural(data.feedback.length - 1, "other feedback")}; it answers from now on.`
        : `Version ${data.number} learned from this, but does not answer: ${data.reason}`;
      if (data.feedback.length === 1 && data.status === "promoted") line.textContent = `Version ${data.number} learned from this; it answers from now on.`;
    } else if (event === "learn" && data.phase === "begins") line.textContent = `Version ${data.version} is being made from it …`;
    else if (event === "learn" && data.phase === "failed") line.textContent = `It could not be learned from: ${data.reason}`;
    else if (event === "learn" && data.phase === "cancelled") line.textContent = "It was cancelled before it was learned from.";
    else if (event === "learn" && data.phase === "nothing to learn") line.textContent = "The objective does not use this feedback.";
  }
}
