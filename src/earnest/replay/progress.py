"""The progress of `earnest replay`: a bar per stage on a terminal, a line for each tenth elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


class StageBars:
    """Called with (stage, done, total) while the job runs; a context manager."""

    def __init__(self, out: Console) -> None:
        self.out = out
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=out,
            disable=not out.is_terminal,
        )
        self.bars: dict[str, TaskID] = {}
        self.tenths: dict[str, int] = {}

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self.out.is_terminal:
            tenth = 10 * done // total if total else 0
            if self.tenths.get(stage) != tenth:
                self.tenths[stage] = tenth
                self.out.print(f"{stage}: {done}/{total}" if total else f"{stage} …", highlight=False, markup=False)
        elif total:
            if stage not in self.bars:
                self.bars[stage] = self.progress.add_task(stage, total=total)
            self.progress.update(self.bars[stage], completed=done)
