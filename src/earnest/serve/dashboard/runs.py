"""Run folders for the dashboard: those in ``runs/`` of the data folder, and in ``runs/`` where the server started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from earnest.errors import EarnestError
from earnest.serve.settings import ServeSettings

if TYPE_CHECKING:
    from earnest.report.record import Run

MOST = 50
SHOWN = ("gradient norm", "learning rate", "trainer/idle", "sampler/idle", "sampler/age", "tokens per second")
"""Numbers of the steps that have a chart beside reward and losses; the report has all."""


def folders(settings: ServeSettings) -> list[Path]:
    """The newest first, each name once."""
    found: dict[str, tuple[float, Path]] = {}
    for place in (settings.data / "runs", Path("runs")):
        if place.is_dir():
            for path in place.iterdir():
                if path.name not in found and (path / "run.json").is_file():
                    found[path.name] = ((path / "run.json").stat().st_mtime, path)
    return [path for _, path in sorted(found.values(), reverse=True)[:MOST]]


def summary(path: Path) -> dict[str, Any]:
    """A line of the list; a folder that cannot be read is listed with the reason."""
    from earnest.report.load import load

    try:
        return _summary(load(path))
    except (EarnestError, OSError) as error:
        return {"object": "run", "name": path.name, "status": "unreadable", "reason": str(error)}


def _summary(run: Run) -> dict[str, Any]:
    header, change = run.header, run.change
    same = ("status", "reason", "task", "objective", "adapter", "steps", "steps_done", "updated")
    return {
        "object": "run",
        "name": run.folder.name,
        "model": str(header.model),
        **{name: getattr(header, name) for name in same},
        "reward_before": run.evaluations[0].reward if run.evaluations else None,
        "reward_after": change.after.reward if change else None,
        "measure": run.measure,
        "before": run.evaluations[0].value if run.evaluations else None,
        "after": change.after.value if change else None,
        "verdict": None if run.verdict is None else run.verdict.holds,
    }


def detail(path: Path) -> dict[str, Any]:
    """The report's charts as data, and the audit's findings."""
    from earnest.report.curves import loss_charts, metric_charts, reward_chart
    from earnest.report.load import load

    run = load(path)
    chosen = [chart for chart in metric_charts(run)[0] if chart.title in SHOWN]
    charts = [chart for chart in (reward_chart(run), *loss_charts(run), *chosen) if chart is not None]
    checks = [] if run.verdict is None else run.verdict.checks
    return {
        **_summary(run),
        "charts": [chart.data() for chart in charts],
        "findings": [
            {"law": c.law, "subject": c.subject, "measured": str(c.measured), "outcome": c.outcome, "meaning": c.detail}
            for c in checks
        ],
        "gaps": list(run.gaps),
    }
