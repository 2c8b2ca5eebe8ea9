"""The headline of a run for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from earnest.report.load import load
from earnest.report.markup import duration, fixed, plus_minus, signed
from earnest.report.watch import concern

if TYPE_CHECKING:
    from rich.table import Table


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
        fails = verdict.count("fails")
        row(
            "verdict",
            f"{fails} of {len(verdict.checks)} fail" if fails else f"{verdict.count('holds')} hold",
            "red" if fails else "",
        )
    for gap in run.gaps:
        row("note", gap, "yellow")
    return grid
