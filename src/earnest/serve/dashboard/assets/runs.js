// Training runs in run folders beside the server.
import { $, badge, el, findings, keepFocus, number } from "/dashboard/dom.js";
import { chart } from "/dashboard/chart.js";
import { blob, get } from "/dashboard/wire.js";

const TONES = { finished: "good", running: "warn", failed: "bad", unreadable: "bad" };

export async function show(app) {
  const list = (await get("/v1/runs")).data;
  keepFocus($("run-list"), () => list.length ? list.map((run) => row(app, run)) : [el("p", { class: "none" }, "No run folders here: none in runs/ where the server was started, none in its data folder.")]);
  for (const open of $("run-list").querySelectorAll("details[open]")) open.dispatchEvent(new Event("toggle"));
}

function row(app, run) {
  const gain = run.after !== null && run.after !== undefined ? `held-out ${run.measure} ${number(run.before)} → ${number(run.after)}` : "";
  const box = el("div", {});
  const more = run.status === "unreadable" ? null : el("details", { "data-key": "run-" + run.name, ontoggle: () => { if (more.open) app.act(fill(app, run.name, box), false); } }, el("summary", {}, "curves and verdict"), box);
  return el("article", { class: "run", "aria-label": run.name },
    el("div", { class: "top" }, el("b", {}, run.name), badge(TONES[run.status] ?? "quiet", run.status),
      run.verdict === null || run.verdict === undefined ? null : badge(run.verdict ? "good" : "bad", run.verdict ? "laws hold" : "a law is broken"),
      run.task ? el("span", { class: "soft" }, `${run.task} on ${run.model}, ${run.steps_done} of ${run.steps} steps`) : null, gain ? el("span", {}, gain) : null),
    run.reason ? el("p", { class: "soft" }, run.reason) : null, more);
}

async function fill(app, name, box) {
  if (box.hasChildNodes()) return;
  const run = await get(`/v1/runs/${encodeURIComponent(name)}`);
  box.replaceChildren(
    el("p", { class: "soft" }, run.objective, run.adapter ? ` · ${run.adapter}` : ""),
    el("div", { class: "grid" }, run.charts.map((c) => chart(c))),
    run.findings.length ? el("details", { "data-key": "law-" + name }, el("summary", {}, `audit: ${run.findings.length} checks`), findings(run.findings)) : el("p", { class: "none" }, "There is no verdict in this folder."),
    el("p", {}, el("button", { type: "button", onclick: () => app.act(page(name), false) }, "Open the report")));
}

async function page(name) {
  const address = URL.createObjectURL(await blob(`/v1/runs/${encodeURIComponent(name)}/report`));
  el("a", { href: address, target: "_blank", rel: "noopener" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}
