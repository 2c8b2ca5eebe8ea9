"""Several runs side by side: their results, the settings in which they differ, and every curve of theirs in one chart.

Runs that differ only in their seed also get mean ± s.d. over the runs, with the divisor n - 1.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earnest.report import curves, page
from earnest.report.blocks import none, note, row, section, table
from earnest.report.curves import Chart, Points, Series
from earnest.report.headline import TITLES, status
from earnest.report.load import load
from earnest.report.markup import Html, duration, el, fixed, join, plus_minus, signed
from earnest.report.record import Change, ReportError, Run
from earnest.report.sections import figure, figures
from earnest.report.watch import RunWatch, concern

if TYPE_CHECKING:
    from rich.console import Group

ENVIRONMENT = ("earnest", "device", "dtype", "threads", "packages")
"""The keys of environment.json that are compared."""


def runs_of(places: Sequence[Path]) -> list[Run]:
    """The runs in these folders. A folder that is not a run stands for the runs inside it."""
    found = []
    for place in places:
        inside: list[Path] = []
        for path in sorted(place.rglob("run.json"), key=lambda path: (len(path.parts), path)):
            if not any(path.is_relative_to(run) for run in inside):  # the folder of a replica belongs to its run
                inside.append(path.parent)
        found += sorted(inside) or [place]
    if len(found) < 2:
        raise ReportError("give two or more run folders, or a folder with several runs in it, to compare them.")
    return [load(place) for place in found]


def labels(runs: Sequence[Run]) -> list[str]:
    """Names of the runs: their folders, with as many parents as it takes to tell them apart."""
    parts = [run.folder.resolve().parts for run in runs]
    depth = 1
    while depth < max(map(len, parts)) and max(Counter(p[-depth:] for p in parts).values()) > 1:
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def differing(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(key, the value in each run) of the settings and versions that differ; a run without the key has "–"."""
    tables = [_settings(run) for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [(key, [table.get(key, "–") for table in tables]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _settings(run: Run) -> dict[str, str]:
    from earnest.config.text import parse

    found: dict[str, str] = {}

    def put(value: Any, key: str) -> None:
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                put(inner, f"{key}.{name}" if key else str(name))
        elif isinstance(value, list) and any(isinstance(one, Mapping) for one in value):
            for place, inner in enumerate(value):
                put(inner, f"{key}.{place}")
        else:
            found[key] = "none" if value is None else str(value)

    put(parse(run.config or "", "config.yaml") or {}, "")
    put({name: value for name, value in (run.environment or {}).items() if name in ENVIRONMENT}, "environment")
    found.pop("description", None)
    return found


def only_seeds(runs: Sequence[Run]) -> bool:
    """Whether the runs differ in nothing but their seed."""
    return {key for key, _ in differing(runs)} == {"seed"}


def over_seeds(runs: Sequence[Run]) -> dict[str, tuple[float, float]]:
    """Mean and s.d. over the runs of the result before and after and of the change; empty if one is missing."""
    changes = [run.change for run in runs]
    table: dict[str, list[float]] = {"before": [], "after": [], "change": []}
    for change in changes:
        if change is None or change.gain is None or change.before.value is None or change.after.value is None:
            return {}
        for values, value in zip(table.values(), (change.before.value, change.after.value, change.gain), strict=True):
            values.append(value)
    return {name: (statistics.fmean(values), statistics.stdev(values)) for name, values in table.items()}


COLUMNS = ("run", "status", "steps", "measure", "before", "after", "change", "vs. first", "training time")
NARROW = ("run", "steps", "measure", "before", "after", "change", "vs. first")
"""The columns in a terminal."""


def results(runs: Sequence[Run]) -> list[list[str]]:
    """A row of text for each run (``COLUMNS``), and one of mean ± s.d. where the runs differ only in their seed.

    The difference to the first run has the standard error of each prompt's difference, if both were measured alike.
    """
    rows = []
    first = runs[0].change
    for name, run in zip(labels(runs), runs, strict=True):
        header, change = run.header, run.change
        steps = f"{header.steps_done:,}" + ("" if header.steps_done == header.steps else f" of {header.steps:,}")
        numbers = ["–"] * 4
        if change is not None:
            numbers = [
                plus_minus(fixed(change.before.value), change.before.se),
                plus_minus(fixed(change.after.value), change.after.se)
                + (f" (step {change.after.step:,})" if header.best is not None else ""),
                plus_minus(signed(change.gain), change.se),
                "–" if first is None or run is runs[0] else _against(first, change),
            ]
        found = concern(run)
        state = header.status if found is None else f"{header.status}, {found}"
        rows.append([name, state, steps, run.measure, *numbers, duration(header.seconds)])
    seeds = over_seeds(runs) if only_seeds(runs) else {}
    if seeds:
        spread = [f"{fixed(mean)} ± {fixed(sd)}" for mean, sd in seeds.values()]
        rows.append(["mean ± s.d.", "", f"{len(runs)} seeds", runs[0].measure, *spread, "", ""])
    return rows


def _against(first: Change, change: Change) -> str:
    if first.after.measure != change.after.measure or first.after.prompts != change.after.prompts:
        return "measured otherwise"
    between = Change(first.after, change.after)
    return plus_minus(signed(between.gain), between.se)


def write(runs: Sequence[Run], to: Path) -> Path:
    return page.put(render(runs), to)


def render(runs: Sequence[Run]) -> str:
    titles = dict.fromkeys(f"{run.header.task} on {run.header.model}" for run in runs)
    large, grid = charts(runs)
    shown = [figure(chart, large=True) for chart in large]
    kicker, count = el("p", "earnest compare", class_="kicker"), el("p", f"{len(runs)} runs", class_="soft")
    body = [
        el("header", kicker, el("h1", " · ".join(titles)), count, class_="headline"),
        section("results", "Results", _results(runs)),
        section("settings", "Settings that differ", _differences(runs)),
        section("curves", "Curves", *shown, figures(grid)),
        section("watch", "Warnings", *_warnings(runs)),
    ]
    names = {"results": "Results", "settings": "Settings", "curves": "Curves", "watch": "Warnings"}
    return page.document(f"{len(runs)} runs · earnest", names, body, [*large, *grid], ", ".join(labels(runs)))


def _results(runs: Sequence[Run]) -> Html:
    rows = []
    for place, cells in enumerate(results(runs)):
        mark = el("span", class_=f"key c{place % 6}", aria_hidden="true") if place < len(runs) else None
        state = status(runs[place]) if place < len(runs) else ""
        rows.append(row(join(mark, cells[0]), state, *cells[2:]))
    measures = dict.fromkeys(TITLES[run.measure] for run in runs)
    words = f"{', '.join(measures)}; ± 1 standard error over prompts or rows."
    if not only_seeds(runs):
        words += " It is not the spread over seeds, and one seed has no spread: compare several (repeat=3)."
    return el("div", table("Results", COLUMNS, rows, "terms results"), note(words))


def _differences(runs: Sequence[Run]) -> Html:
    found = differing(runs)
    if not found:
        return none("None: the runs have the same settings and versions.")
    rows = (row(key, *map(_short, values)) for key, values in found)
    return table("Settings that differ", ("setting", *labels(runs)), rows, "terms")


def _warnings(runs: Sequence[Run]) -> list[Html]:
    shown = []
    for name, run in zip(labels(runs), runs, strict=True):
        watched = RunWatch.of(run).warnings
        told = [*watched, *(e.text for e in run.events if e.level == "warning" and e.text not in watched)]
        items = (el("li", text) for text in told)
        shown.append(el("div", el("h3", name), el("ul", *items) if told else none("none")))
    return shown


def _short(value: str) -> str:
    return value if len(value) <= 80 else value[:79] + "…"


def charts(runs: Sequence[Run]) -> tuple[list[Chart], list[Chart]]:
    """(held-out result and training reward, every other number); one series per run, in the run's colour."""
    names = labels(runs)
    held = []
    for colour, (name, run) in enumerate(zip(names, runs, strict=True)):
        there = [(float(e.step), e.value, e.se or 0.0) for e in run.evaluations if e.value is not None]
        if there:
            x, y, se = zip(*there, strict=True)
            low, high = ([a + sign * b for a, b in zip(y, se, strict=True)] for sign in (-1, 1))
            held.append(Series(name, "bars", x, y, tuple(low), tuple(high), colour))
    large = []
    if held:
        table = curves.table({one.label: list(zip(one.x, one.y, strict=True)) for one in held})
        title = TITLES[runs[0].measure] if len({run.measure for run in runs}) == 1 else "Held-out result"
        large.append(Chart("heldout", title, tuple(held), table, "Bars: ± 1 standard error."))
    rewards = [curves.points(run.steps, lambda step: step.reward.mean if step.reward else None) for run in runs]
    reward = _chart("training", "Mean training reward", names, rewards, smooth=True)
    large += [reward] if reward is not None else []
    numbers = [_numbers(run) for run in runs]
    grid = []
    for place, title in enumerate(dict.fromkeys(title for own in numbers for title in own)):
        chart = _chart(f"number.{place}", title, names, [own.get(title, []) for own in numbers])
        values = [] if chart is None else [v for one in chart.series for v in one.y]
        if chart is not None and max(values) > min(values):
            grid.append(chart)
    return large, grid


def _numbers(run: Run) -> dict[str, Points]:
    """Every number of the steps and of the evaluations besides the reward, by its title."""
    own = {one.title: one.pairs for one in curves.metric_points(run)}
    for chart in (*curves.loss_charts(run), *curves.evaluation_charts(run)):
        own[chart.title] = [pair for one in chart.series for pair in zip(one.x, one.y, strict=True)]
    return own


def _chart(key: str, title: str, names: Sequence[str], points: Sequence[Points], smooth: bool = False) -> Chart | None:
    """One line per run; ``smooth``: the running mean over a twentieth of the steps."""
    longest = max(map(len, points))
    if not longest:
        return None
    window = 2 * (longest // 40) + 1 if smooth else 1
    series = tuple(
        curves.thin(name, "line", curves.running_mean(pairs, window), colour)
        for colour, (name, pairs) in enumerate(zip(names, points, strict=True))
        if pairs
    )
    table = curves.table({name: pairs for name, pairs in zip(names, points, strict=True) if pairs})
    return Chart(key, title, series, table, f"The mean over {window} steps." if window > 1 else "")


def terminal(runs: Sequence[Run], columns: Sequence[str] = NARROW) -> Group:
    """The results (these ``COLUMNS``), and the settings in which the runs differ, as tables. A measure that all runs
    share is named once, above."""
    from rich.console import Group
    from rich.table import Table

    measures = sorted({run.measure for run in runs})
    columns = [name for name in columns if name != "measure" or len(measures) > 1]
    shown = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        shown.add_column(name, overflow="fold", no_wrap=name != "run")
    for values in results(runs):
        cells = dict(zip(COLUMNS, values, strict=True))
        if cells["status"] not in ("", "finished"):
            cells["run"] += f" ({cells['status'].removeprefix('finished, ')})"
        shown.add_row(*(cells[name] for name in columns), style="bold" if not cells["status"] else "")
    found = differing(runs)
    above = [f"measure: {measures[0]}"] if len(measures) == 1 else []
    if not found or only_seeds(runs):
        return Group(*above, shown)
    settings = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("setting", *labels(runs)):
        settings.add_column(name, overflow="fold")
    for key, values in found:
        settings.add_row(key, *(_short(value) for value in values))
    return Group(*above, shown, "", settings)
