// The API, and the stream of events. The key is in this tab's sessionStorage and in a header, nowhere else.
const STORE = "earnest-key";
let given = null;
try { given = sessionStorage.getItem(STORE); } catch { /* storage may be forbidden: then the key lasts as long as the page */ }

export function useKey(key) {
  given = key || null;
  try { if (given) sessionStorage.setItem(STORE, given); else sessionStorage.removeItem(STORE); } catch { /* as above */ }
}
export const hasKey = () => given !== null;

export class Refused extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (given) headers.Authorization = "Bearer " + given;
  let answer;
  try { answer = await fetch(path, { ...options, headers, cache: "no-store" }); } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server cannot be reached.", 0);
  }
  if (answer.ok) return answer;
  let message = `The server answered ${answer.status}.`;
  try { message = (await answer.json()).error.message; } catch { /* no JSON: the status has to do */ }
  throw new Refused(message, answer.status);
}

export const get = async (path) => (await request(path)).json();
export const post = async (path, body) => (await send(path, body)).json();
const send = (path, body, signal) => request(path, { method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
export const remove = async (path) => (await request(path, { method: "DELETE" })).json();
export const blob = async (path) => (await request(path)).blob();
export const at = (name) => "/v1/adapters/" + name.split("/").map(encodeURIComponent).join("/");

async function* events(answer) {
  // Server-sent events as {event, id, data}.
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const found = { event: "message", id: null, data: "" };
      for (const line of block.split("\n")) {
        const [, name, text] = /^(event|id|data): ?(.*)$/.exec(line) ?? [];
        if (name) found[name] = text;
      }
      yield found;
    }
  }
}

export async function chat(body, each, signal) {
  // Stream an answer: each(chunk) for every piece of it.
  const answer = await send("/v1/chat/completions", { ...body, stream: true }, signal);
  for await (const { data } of events(answer)) {
    if (!data || data === "[DONE]") continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message, 500);
    each(chunk);
  }
}

export async function watch(told, state) {
  // Follow /v1/events for ever; after a break, ask for what was missed. Not an EventSource: that could not send the key.
  let last = "0"; // from the beginning, as far back as the server remembers
  for (;;) {
    try {
      const answer = await request("/v1/events", { headers: { "Last-Event-ID": last } });
      state("live");
      for await (const { event, id, data } of events(answer)) {
        if (id !== null) last = id;
        if (data) told(event, JSON.parse(data));
      }
      state("away");
      last = "0"; // a server that starts again counts from one
    } catch (error) {
      state("away", error);
      if (error.status === 401) return;
    }
    await new Promise((again) => setTimeout(again, 2000));
  }
}
