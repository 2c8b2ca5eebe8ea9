"""The report of a replay as JSON and as a page: the pairs, what was dropped and why with examples, and the costs;
and the progress while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from earnest.disk import write_json, write_text
from earnest.replay.pairs import Pair
from earnest.replay.pipeline import Replayed, count
from earnest.replay.traces import plain_text
from earnest.report.blocks import static
from earnest.report.markup import Html, el, number

EXAMPLES = 3
SHOWN = 400
"""Characters of an example."""
COUNTED = ("replies", "tries", "prompt_tokens", "completion_tokens")
PAID = ("who", "replies", "tries", "prompt tokens", "answer tokens", "dollars")


def summary(found: Replayed) -> dict[str, Any]:
    """The whole result, JSON-able. Each requested answer is a pair or has a reason why not."""
    kept = found.cleaned.pairs
    return {
        "pairs": str(found.path),
        "traces": len(found.traces.traces),
        "turns": found.turns,
        "answers_asked": found.asked,
        "pairs_made": len(found.made),
        "pairs_kept": len(kept),
        "teacher_won": sum(pair.winner == "teacher" for pair in kept),
        "margin_mean": sum(pair.margin for pair in kept) / len(kept),
        "no_pair": [
            {"reason": why, "count": n, "examples": [asdict(d) for d in found.drops if d.reason == why][:EXAMPLES]}
            for why, n in count(found.drops).items()
        ],
        "filters": [asdict(step) for step in found.cleaned.steps],
        "cleaned_by": found.cleaned.backend,
        "costs": {name: asdict(account) for name, account in found.ledger.accounts.items()},
        "dollars": found.ledger.dollars,
        "bad_lines": [asdict(line) for line in found.traces.bad],
        "unread_keys": found.traces.unread,
        "examples": [_shown(pair) for pair in kept[:EXAMPLES]],
    }


def _shown(pair: Pair) -> dict[str, Any]:
    where = {"trace": pair.trace, "turn": pair.turn, "teacher": pair.teacher, "margin": pair.margin}
    answers = {name: plain_text(getattr(pair, name)) for name in ("chosen", "rejected")}
    return where | {"prompt": pair.text("prompt")} | answers


def write(found: Replayed) -> tuple[dict[str, Any], Path]:
    """``pairs.parquet.report.json`` and ``.html`` beside the pairs; (the summary, the page)."""
    data = summary(found)
    write_json(found.path.with_name(f"{found.path.name}.report.json"), data)
    page = found.path.with_name(f"{found.path.name}.report.html")
    write_text(page, render(data))
    return data, page


def show(data: Mapping[str, Any], out: Console) -> None:
    """The counts as tables; the examples are on the page."""
    table = Table(title=f"{data['answers_asked']} answers to {data['turns']} turns of {data['traces']} traces")
    table.title_justify = "left"
    for name, justify in (("result", "left"), ("number", "right"), ("for example", "left")):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows(data):
        table.add_row(*(escape(cell) for cell in row))
    out.print(table)
    for name, cost in data["costs"].items():
        tokens = f"{cost['prompt_tokens']:,} + {cost['completion_tokens']:,} tokens"
        money = "" if cost["dollars"] is None else f", ${cost['dollars']:.4f}"
        unknown = f", {cost['unknown']} replies without a count" if cost["unknown"] else ""
        out.print(f"{name}: {cost['replies']} replies in {cost['tries']} tries, {tokens}{money}{unknown}", markup=False)
    if data["bad_lines"]:
        out.print(f"{len(data['bad_lines'])} malformed lines were left out (bad_lines=drop)", style="yellow")
    if data["unread_keys"]:
        out.print(f"keys of the traces that nothing read: {', '.join(data['unread_keys'])}", style="dim", markup=False)


def rows(data: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, number, an example), from the answers to the pairs that are left."""
    found = [
        (f"no pair: {d['reason']}", f"{d['count']:,}", _clip(d["examples"][0]["text"], 60)) for d in data["no_pair"]
    ]
    found.append(("pairs made", f"{data['pairs_made']:,}", ""))
    for step in data["filters"]:
        example = _clip(step["examples"][0]["text"], 60) if step["examples"] else ""
        unjudged = f", {step['unjudged']} without text" if step["unjudged"] else ""
        found.append((f"dropped by {step['op']} on {step['field']}{unjudged}", f"{step['dropped']:,}", example))
    won = f"the teacher won {data['teacher_won']:,}, mean margin {data['margin_mean']:.3g}"
    found.append((f"pairs kept (cleaned by {data['cleaned_by']})", f"{data['pairs_kept']:,}", won))
    return found


def _clip(text: str, length: int = SHOWN) -> str:
    return text if len(text) <= length else f"{text[:length]}…"


def render(data: Mapping[str, Any]) -> str:
    """One HTML file that loads nothing."""
    title = f"{data['pairs_kept']:,} preference pairs from {data['traces']:,} traces"
    bad = [[str(line["line"]), line["why"]] for line in data["bad_lines"]]
    return static(
        f"{title} · earnest",
        EXTRA,
        el("div", el("p", str(data["pairs"]), class_="kicker"), el("h1", title), class_="headline"),
        _section("The answers", _table(("what", "number", "for example"), rows(data))),
        *([_section("Pairs", *[_pair(e) for e in data["examples"]])] if data["examples"] else []),
        _section("Answers that became no pair", *[_reason(d) for d in data["no_pair"]] or [el("p", "none")]),
        _section("Dropped by filters", *[_filter(f) for f in data["filters"]] or [el("p", "no filter was set")]),
        _section("Costs", _table(PAID, _costs(data))),
        *([_section("Malformed lines", _table(("line", "why"), bad))] if bad else []),
    )


EXTRA = """
section { margin: 2.4rem 0; } table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td.n, th.n { text-align: right; } blockquote { margin: .4rem 0 1rem; padding: .5rem .9rem; background: var(--sheet);
border-left: 3px solid var(--rule); white-space: pre-wrap; overflow-wrap: anywhere; }
blockquote.good { border-color: var(--good); } blockquote.bad { border-color: var(--bad); }
h3 { margin: 1.2rem 0 .3rem; }
"""


def _section(title: str, *parts: Html) -> Html:
    return el("section", el("h2", title), *parts)


def _table(names: Sequence[str], lines: Sequence[Sequence[str]]) -> Html:
    numeric = [all(line[i].replace(",", "").replace(".", "").isdigit() for line in lines) for i in range(len(names))]
    cells = [
        el("tr", *[el("td", cell, class_="n" if numeric[i] else None) for i, cell in enumerate(line)]) for line in lines
    ]
    return el(
        "table",
        el("thead", el("tr", *[el("th", name, class_="n" if numeric[i] else None) for i, name in enumerate(names)])),
        el("tbody", *cells),
    )


def _pair(example: Mapping[str, Any]) -> Html:
    where = f"{example['trace']}, turn {example['turn']}, {example['teacher']}, margin {number(example['margin'])}"
    return el(
        "div",
        el("h3", where),
        el("blockquote", _clip(example["prompt"])),
        el("blockquote", el("b", "chosen "), _clip(example["chosen"]), class_="good"),
        el("blockquote", el("b", "rejected "), _clip(example["rejected"]), class_="bad"),
    )


def _reason(drop: Mapping[str, Any]) -> Html:
    examples = [el("blockquote", f"{e['trace']}, turn {e['turn']}: {_clip(e['text'])}") for e in drop["examples"]]
    return el("div", el("h3", f"{drop['reason']}: {drop['count']:,}"), *examples)


def _filter(step: Mapping[str, Any]) -> Html:
    settings = ", ".join(f"{name} {value}" for name, value in step["settings"].items())
    title = f"{step['op']} on {step['field']} ({settings or 'no settings'}): {step['dropped']:,} of {step['judged']:,}"
    examples = []
    for e in step["examples"]:
        value = "" if e["value"] is None else f" ({number(e['value'])})"
        twin = "" if e["twin"] is None else f" (as pair {e['twin']})"
        examples.append(el("blockquote", f"{e['trace']}, turn {e['turn']}{value}{twin}: {_clip(e['text'])}"))
    return el("div", el("h3", title), *examples)


def _costs(data: Mapping[str, Any]) -> list[list[str]]:
    return [
        [who, *(f"{cost[name]:,}" for name in COUNTED), "–" if cost["dollars"] is None else f"{cost['dollars']:.4f}"]
        for who, cost in data["costs"].items()
    ]


@contextmanager
def stage_bars(out: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Inside the block: a function that is called with (stage, done, total) while the job runs."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bars: dict[str, Any] = {}
    tenths: dict[str, int] = {}
    with Progress(*columns, TimeRemainingColumn(), console=out, disable=not out.is_terminal) as progress:

        def show(stage: str, done: int, total: int) -> None:
            tenth = 10 * done // total if total else 0
            if not out.is_terminal and tenths.get(stage) != tenth:
                tenths[stage] = tenth
                out.print(f"{stage}: {done}/{total}" if total else f"{stage} …", highlight=False, markup=False)
            elif out.is_terminal and total:
                if stage not in bars:
                    bars[stage] = progress.add_task(stage, total=total)
                progress.update(bars[stage], completed=done)

        yield show
