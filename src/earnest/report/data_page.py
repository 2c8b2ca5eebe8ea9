"""What would be trained on: the rows of a data file with their trained tokens in colour, as text and as a page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from earnest.data.dataset import Dataset, Side
from earnest.data.layouts import Example
from earnest.data.rendering import Rendered, stretches
from earnest.report.blocks import static
from earnest.report.markup import Html, el, join

BINS = 12
LISTED = 20
"""Problems, duplicates and leaks that are listed."""
QUESTIONS = (
    "no token: an answer is for a grader, which a run needs (grade=exact, for example); to train on the answers, give "
    "columns.prompt=… columns.completion=… with the names of your columns"
)
_BARS = " ▁▂▃▄▅▆▇█"


def summary(data: Dataset) -> dict[str, Any]:
    """Everything that was found, JSON-able."""
    counts, lengths = data.counts, sorted(data.counts.lengths.elements())
    return {
        "source": data.settings.train,
        "layout": None if data.layout is None else data.layout.name,
        "rows": counts.rows,
        "train": data.size("train"),
        "heldout": data.size("heldout"),
        "tokens": {
            "limit": data.limit,
            "shortest": lengths[0] if lengths else 0,
            "median": lengths[len(lengths) // 2] if lengths else 0,
            "longest": lengths[-1] if lengths else 0,
            "all": sum(lengths),
            "trained": counts.trained_tokens,
        },
        "histogram": histogram(lengths),
        "too_long": counts.too_long,
        "truncated": counts.truncated,
        "problems": [{"place": str(p.place), "problem": p.sentence} for p in data.problems],
        "duplicates": [[str(a), str(b)] for a, b in data.duplicates],
        "leaks": [[str(a), str(b)] for a, b in data.leaks],
    }


def histogram(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(upper edge in tokens, rows), in bins of equal width."""
    if not lengths:
        return []
    width = max(1, -(-lengths[-1] // BINS))
    return [(edge, sum(edge - width < n <= edge for n in lengths)) for edge in range(width, lengths[-1] + width, width)]


def terminal(data: Dataset, rows: int, coloured: bool) -> RenderableType:
    """The counts, the problems, and the first ``rows`` rows of each side. Trained tokens are green; without colours (a
    pipe, a file) they stand between ⟦ and ⟧."""
    found = summary(data)
    table = Table.grid(padding=(0, 2))
    for name, value in _facts(found):
        table.add_row(Text(name, style="dim"), value)
    parts: list[RenderableType] = [table]
    for title, lines, style in _lists(found):
        if lines:
            parts += [Text(f"\n{title}", style=f"bold {style}"), *(Text(f"  {line}") for line in lines[:LISTED])]
            if len(lines) > LISTED:
                parts.append(Text(f"  and {len(lines) - LISTED} more (--json lists all)", style="dim"))
    shown = list(_shown(data, rows))
    if shown and found["layout"] != "questions":
        parts.append(Text(f"\ntrained tokens are {'green' if coloured else 'between ⟦ and ⟧'}", style="dim"))
    for side, number, example in shown:
        parts.append(Text(f"\n{side} row {number}", style="bold"))
        for name, rendered in _versions(data, example):
            line = Text(f"{name}: " if name else "", style="dim")
            for trained, _, text in stretches(data.policy.tokenizer, rendered):
                line.append(text if coloured or not trained else f"⟦{text}⟧", style="green" if trained else "default")
            parts.append(Padding(line, (0, 0, 0, 2)))
    return Group(*parts)


def _facts(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    tokens = found["tokens"]
    yield "data", f"{found['source']}: {found['rows']:,} rows"
    yield "layout", str(found["layout"])
    yield "split", f"{found['train']:,} to train on, {found['heldout']:,} held out"
    if tokens["all"]:
        highest = max(n for _, n in found["histogram"])
        bars = "".join(_BARS[-(-8 * n // highest)] for _, n in found["histogram"])
        yield (
            "tokens per row",
            f"{tokens['shortest']} to {tokens['longest']}, median {tokens['median']}, limit {tokens['limit']}   {bars}",
        )
        yield "trained", f"{tokens['trained']:,} of {tokens['all']:,} tokens ({tokens['trained'] / tokens['all']:.0%})"
    if found["layout"] == "questions":
        yield "trained", QUESTIONS
    yield (
        "found",
        f"{len(found['problems'])} problems, {found['too_long']} rows too long, {len(found['duplicates'])} duplicates, "
        f"{len(found['leaks'])} held-out prompts that are also trained on",
    )


def _lists(found: dict[str, Any]) -> Iterator[tuple[str, list[str], str]]:
    yield "problems", [f"{p['place']}: {p['problem']}" for p in found["problems"]], "red"
    yield "held out and trained on", [f"{a} and {b}" for a, b in found["leaks"]], "red"
    yield "duplicates", [f"{b} repeats {a}" for a, b in found["duplicates"]], "yellow"


def _shown(data: Dataset, rows: int) -> Iterator[tuple[Side, int, Example]]:
    sides: tuple[Side, Side] = ("train", "heldout")
    for side in sides:
        for index in range(min(rows, data.size(side))):
            yield side, index + 1, data.at(side, index)


def _versions(data: Dataset, example: Example) -> list[tuple[str, Rendered]]:
    """The rows of tokens of an example, each with a name where there are several."""
    if example.kind == "question":
        tokens = tuple(data.policy.render(example.prompt))
        return [("", Rendered(tokens, (False,) * len(tokens)))]
    made = data.rendered(example)
    names = ["chosen", "rejected"] if example.kind == "pair" else [""] * len(made)
    if example.kind == "judged":
        names = ["wanted" if example.label else "unwanted"]
    return list(zip(names, made, strict=False))


_STYLE = """
.bars { display: flex; align-items: end; gap: 2px; height: 5rem; margin: 1rem 0 .3rem; max-width: 30rem; }
.bars span { flex: 1; background: var(--c0); min-height: 1px; }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1.4rem; }
dl.facts dt { color: var(--soft); }
section { padding: 1.6rem 0 0; }
"""


def page(data: Dataset, rows: int) -> str:
    """One HTML file that loads nothing."""
    found, tokenizer = summary(data), data.policy.tokenizer
    title = f"{found['rows']:,} rows of {found['source']}"
    facts = [part for name, value in _facts(found) for part in (el("dt", name), el("dd", value.split("   ")[0]))]
    sections = [
        el("section", el("h2", "What would be trained on"), el("dl", *facts, class_="facts"), _histogram(found))
    ]
    for name, lines, _ in _lists(found):
        if lines:
            sections.append(el("section", el("h2", name.capitalize()), el("ul", *[el("li", line) for line in lines])))
    shown = []
    for side, number, example in _shown(data, rows):
        for name, row in _versions(data, example):
            marks = (el("mark" if trained else "span", text) for trained, _, text in stretches(tokenizer, row))
            head = el("h3", f"{side} row {number}{f', {name}' if name else ''}")
            shown.append(join(head, el("div", *marks, class_="tokens")))
    note = el("p", "The underlined tokens are trained.", class_="note")
    sections.append(el("section", el("h2", "Rows as the model sees them"), note, *shown))
    return static(title, _STYLE, el("div", el("h1", title), class_="headline"), *sections)


def _histogram(found: dict[str, Any]) -> Html | None:
    bins = found["histogram"]
    if not bins:
        return None
    highest = max(n for _, n in bins)
    bars = [
        el("span", style=f"height:{100 * n / highest:.0f}%", title=f"up to {edge} tokens: {n} rows") for edge, n in bins
    ]
    caption = f"tokens per row, in bins of {bins[0][0]}; the longest has {found['tokens']['longest']}"
    return join(el("div", *bars, class_="bars", role="img", aria_label=caption), el("p", caption, class_="note"))


def as_json(data: Dataset) -> str:
    return json.dumps(summary(data), indent=1, ensure_ascii=False)
