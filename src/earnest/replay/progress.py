"""The progress of `earnest replay`: a bar per stage on a terminal, a line for each tenth elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn


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
