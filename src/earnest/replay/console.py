"""What `earnest replay` prints while it works and when it is done."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from earnest.config import text
from earnest.config.load import check_mapping
from earnest.config.replay import ReplayConfig


def settings(config: Path | None, overrides: list[str]) -> ReplayConfig:
    """The defaults or a YAML file, with ``key=value`` on top."""
    source = Path(str(resources.files("earnest.replay") / "default.yaml")) if config is None else config
    return check_mapping(ReplayConfig, text.parse_file(source), overrides)


class _Bars:
    """A bar a stage on a terminal, a line for each tenth elsewhere."""

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
        self.bars: dict[str, int] = {}
        self.tenths: dict[str, int] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self.out.is_terminal:
            tenth = 10 * done // total if total else 0
            if self.tenths.get(stage) != tenth:
                self.tenths[stage] = tenth
                self.out.print(f"{stage}: {done}/{total}" if total else f"{stage} …", highlight=False, markup=False)
        elif total:
            if stage not in self.bars:
                self.bars[stage] = self.progress.add_task(stage, total=total)
            self.progress.update(self.bars[stage], completed=done)  # type: ignore[arg-type]


def replay(traces: Path, overrides: list[str], config: Path | None) -> None:
    """Replay, report, and say what to do next."""
    from earnest.replay import report
    from earnest.replay.run import replay as run

    out = Console()
    bars = _Bars(out)
    with bars.progress:
        found = run(traces, settings(config, overrides), bars)
    data, page = report.write(found)
    report.show(data, out)
    for what, value in (
        ("pairs", str(found.path)),
        ("report", str(page)),
        ("train on them", f"earnest run prefer data={found.path}"),
    ):
        out.print(f"{what:<16} {value}", markup=False, highlight=False, soft_wrap=True)
