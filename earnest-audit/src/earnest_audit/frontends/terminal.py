"""A verdict in the terminal: a table, the remarks below it, and what the warnings and failures mean."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from earnest_audit.verdict import LawOutcome, Verdict

if TYPE_CHECKING:  # rich is optional: it is imported only where a rich console prints a verdict
    from rich.console import RenderResult

COLOURS: dict[LawOutcome, str] = {
    "holds": "green",
    "fails": "bold red",
    "warns": "bold yellow",
    "not applicable": "dim",
    "not declared": "yellow",
}
COLUMNS = {"law": 16, "subject": 32, "measured": 34, "expected": 18, "verdict": 14}
"""The columns of a table, with the most characters that one has in plain text."""


def show(verdict: Verdict) -> None:
    """Print it: in colour where rich is installed, else in plain text."""
    try:
        from rich.console import Console
    except ImportError:
        print(verdict, end="")
    else:
        Console().print(verdict)


def coloured(verdict: Verdict) -> RenderResult:
    """What a rich console prints."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(verdict.title), title_justify="left")
    for column in COLUMNS:
        table.add_column(column)
    for f in verdict.findings:
        cells = (escape(cell) for cell in (f.law, f.subject, f.measured, f.expected))
        table.add_row(*cells, f"[{COLOURS[f.outcome]}]{f.outcome}[/]")
    yield table
    for remark in verdict.remarks():
        yield f"[dim]· {escape(remark)}[/]"
    for mark, found in (("[yellow]![/]", verdict.warnings), ("[red]✗[/]", verdict.failures)):
        yield from (f"{mark} {escape(f.line)}" for f in found)
    yield verdict.summary


def plain(verdict: Verdict) -> str:
    """The table in plain text."""
    rows = [tuple(COLUMNS), *((f.law, f.subject, f.measured, f.expected, f.outcome) for f in verdict.findings)]
    cells = list(zip(*rows, strict=True))
    widths = [min(most, max(map(len, column))) for most, column in zip(COLUMNS.values(), cells, strict=True)]
    lines = [line for row in rows for line in _wrapped(row, widths)]
    lines.insert(1, "  ".join("-" * width for width in widths))
    below = [f"· {remark}" for remark in verdict.remarks()]
    for mark, found in (("!", verdict.warnings), ("✗", verdict.failures)):
        below += [f"{mark} {f.line}" for f in found]
    folded = [textwrap.fill(text, 120, subsequent_indent="  ", break_on_hyphens=False) for text in below]
    return "\n".join([verdict.title, *lines, *folded, verdict.summary]) + "\n"


def _wrapped(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """A row of the plain table, on as many lines as its longest cell needs."""
    cells = [textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True)]
    for parts in zip_longest(*cells, fillvalue=""):
        yield "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()
