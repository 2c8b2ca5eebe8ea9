"""The top of the page: task, model, held-out reward before → after ± s.e., and warnings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from earnest.errors import ConfigError
from earnest.report.blocks import badge
from earnest.report.laws import tally
from earnest.report.load import load
from earnest.report.markup import Html, duration, el, fixed, join, plus_minus, signed
from earnest.report.record import Change, CheckRecord, EventRecord, Measure, Run, Status
from earnest.report.watch import ADVICE, concern

if TYPE_CHECKING:
    from rich.table import Table


TITLES: dict[Measure, str] = {
    "reward": "Held-out reward",
    "loss": "Held-out loss in nats per trained token",
    "accuracy": "Held-out accuracy (chosen over rejected)",
}
TONES: dict[Status, str] = {"finished": "good", "running": "warn", "interrupted": "warn", "failed": "bad"}


def status(run: Run) -> Html:
    """The run's status; one that finished is green only if no law failed and the watch found nothing."""
    found = concern(run)
    tone = "bad" if run.header.status == "failed" else "warn" if found else TONES[run.header.status]
    return badge(run.header.status if found is None else f"{run.header.status}, {found}", tone)


def headline(run: Run) -> Html:
    header = run.header
    done = f"{header.steps_done:,}"
    facts = {
        "status": status(run),
        "verdict": tally(run.verdict.checks if run.verdict is not None else ()),
        "seed": str(header.seed),
        "steps": done if header.steps_done == header.steps else f"{done} of {header.steps:,}",
        "training time": duration(header.seconds),
        "adapter": header.adapter or "none: all weights",
        "objective": header.objective,
        "started": header.started.replace("T", " ").replace("Z", " UTC"),
    }
    if (ranks := _ranks(run)) is not None:
        facts["processes"] = ranks
    if header.best is not None:
        facts["best checkpoint"] = f"step {header.best['step']:,} by {header.best['metric']}"
    if header.data is not None and "rows" in header.data:
        data = header.data
        counts = ", ".join(f"{data[key]:,} {name}" for key, name in COUNTS.items() if data.get(key) is not None)
        facts["data"] = f"{data['rows']:,} rows of {Path(data['file']).name} ({data['layout']}): {counts}"
    return el(
        "header",
        el("p", "earnest run", el("span", " · ", class_="soft"), header.recipe, class_="kicker"),
        el("h1", header.task, el("span", " on ", class_="soft"), str(header.model)),
        _result(run.change, header.status == "finished"),
        el("dl", *(el("div", el("dt", name), el("dd", value)) for name, value in facts.items()), class_="facts"),
        class_="headline",
    )


def _ranks(run: Run) -> str | None:
    """The processes of a run that shares or copies its base; None for one process."""
    from earnest.config.text import parse  # imports torch

    try:
        found = parse(run.config or "", "config.yaml")
    except ConfigError:  # the section with the config shows the text as it is
        return None
    engine = found.get("engine") if isinstance(found, Mapping) else None
    shard, replicate = (engine.get(key, 1) if isinstance(engine, Mapping) else 1 for key in ("shard", "replicate"))
    if not isinstance(shard, int) or not isinstance(replicate, int) or shard * replicate == 1:
        return None
    parts = [f"the base in {shard} shards" if shard > 1 else "", f"{replicate} copies of it" if replicate > 1 else ""]
    return f"{shard * replicate}: " + ", ".join(part for part in parts if part)


COUNTS = {
    "train": "to train on",
    "heldout": "held out",
    "bad": "bad",
    "too_long": "too long",
    "truncated": "truncated",
    "duplicates": "duplicates",
    "leaked": "in both",
}


def _result(change: Change | None, finished: bool) -> Html:
    if change is None:
        return el("p", "No before and after yet.", class_="result soft")
    before, after = change.before, change.after
    own = after.measure != "reward"
    size = f"{after.prompts} rows" if own else f"{after.prompts} prompts, {after.n} completions"
    if not own and (before.prompts, before.n) != (after.prompts, after.n):
        size = f"before: {before.prompts} prompts, {before.n} completions; after: {size}"
    how = f"over the {'rows' if own else 'prompts'}' differences" if change.paired else "as if the two were independent"
    spread = f"; ± 1 s.e. (the {'change' if own else 'gain'}'s {how})" if change.se is not None else ""
    left = _measure("before", "before", before.value, before.se)
    right = _measure("after", "after" if finished else "so far", after.value, after.se)
    figures = el("p", left, el("span", "→", class_="arrow", role="img", aria_label="to"), right, class_="figures")
    gain = join(el("b", signed(change.gain)), f" ± {fixed(change.se)}" if change.se is not None else None)
    steps = el("span", f" from step {before.step:,} to step {after.step:,}; {size}{spread}.", class_="soft")
    return el("div", figures, el("p", f"{TITLES[after.measure]}, ", gain, steps, class_="caption"), class_="result")


def _measure(kind: str, name: str, value: float | None, se: float | None) -> Html:
    spread = el("span", f" ± {fixed(se)}", class_="se") if se is not None else None
    shown = el("span", fixed(value), class_="value")
    return el("span", el("span", name, class_="tag"), shown, spread, class_=f"measure {kind}")


def notices(run: Run) -> Html | None:
    """Laws that fail, what is missing, and every warning and error."""
    broken = [check for check in run.verdict.checks if check.outcome == "fails"] if run.verdict else []
    reason = run.header.reason or ""
    # gaps and failed laws already contain the line of events.log about the run's end
    known = run.header.status in ("failed", "interrupted") and (broken or len(reason.splitlines()) == 1)
    shown = " ".join(reason.split()) if known else ""
    important = [event for event in run.events if event.level != "info" and not (shown and shown in event.text)]
    items = [
        *(el("li", el("b", "broken"), f": {c.law} on {c.subject}. {c.detail}", class_="bad") for c in broken),
        *(el("li", gap) for gap in run.gaps),
        *(el("li", el("b", event.level), f": {text}") for event, text in _once(important, broken)),
    ]
    if not items:
        return None
    title = el("h2", "Worth knowing")
    return el("aside", title, el("ul", *items), class_="notices", id="notices", aria_label="Worth knowing")


def _once(events: Sequence[EventRecord], broken: Sequence[CheckRecord]) -> list[tuple[EventRecord, str]]:
    """Each event with its text, without the watch's advice where an earlier item has the same advice."""
    found: list[tuple[EventRecord, str]] = []
    for event in events:
        shown = [*(check.detail for check in broken), *(text for _, text in found)]
        known = [way for way in ADVICE.values() if event.text.endswith(way) and any(way in text for text in shown)]
        found.append((event, event.text.removesuffix(known[0]).rstrip() if known else event.text))
    return found


def summary(run_dir: str | Path) -> Table:
    """A small table: what ran, the held-out result before → after ± s.e., the verdict, and what is missing."""
    from rich.table import Table
    from rich.text import Text

    run = load(run_dir)
    header, change, verdict = run.header, run.change, run.verdict
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    grid.add_column()

    def row(name: str, text: str, style: str = "") -> None:
        grid.add_row(name, Text(text, style=style))

    row("run", f"{header.task} on {header.model} · {header.recipe} · seed {header.seed}", "bold")
    row("objective", header.objective)
    found = concern(run)
    state = header.status if found is None else f"{header.status} ({found})"
    row("steps", f"{header.steps_done} of {header.steps}, {state}, {duration(header.seconds)}")
    if change is not None:
        row(
            "held-out" if run.measure == "reward" else f"held-out {run.measure}",
            " → ".join(plus_minus(fixed(e.value), e.se) for e in (change.before, change.after)),
            "bold",
        )
        row("gain" if run.measure == "reward" else "change", f"{signed(change.gain)} ± {fixed(change.se)}")
    if verdict is not None:
        fails, warns = verdict.count("fails"), verdict.count("warns")
        found = f"{fails} of {len(verdict.checks)} fail" if fails else f"{verdict.count('holds')} hold"
        found += f", {warns} warn" + "s" * (warns == 1) if warns else ""
        row("verdict", found, "red" if fails else "yellow" if warns else "")
    for gap in run.gaps:
        row("note", gap, "yellow")
    return grid
