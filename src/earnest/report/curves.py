"""The run's numbers as charts, thinned if the run is long, and the same numbers as tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from earnest.report.record import Run, StepRecord

POINTS = 400
"""The maximum number of points of a series; a longer series is averaged in this many buckets."""

ROWS = 24
"""The maximum number of rows of a chart's table; rows of evaluations are always there."""

CurveStyle = Literal["line", "faint", "bars", "area"]


@dataclass(frozen=True)
class Series:
    """``y`` by ``x``; ``lo`` and ``hi`` are a bucket's extremes, or the ends of an error bar."""

    label: str
    style: CurveStyle
    x: tuple[float, ...]
    y: tuple[float, ...]
    lo: tuple[float, ...] = ()
    hi: tuple[float, ...] = ()
    colour: int = 0
    """The number of the term whose colour it has; −1 is the neutral colour."""


@dataclass(frozen=True)
class Table:
    """A chart's numbers as text. ``note`` is about rows that are left out."""

    columns: tuple[str, ...]
    rows: tuple[tuple[float | None, ...], ...]
    note: str


@dataclass(frozen=True)
class Chart:
    """One chart. Its axis includes ``floor`` and ``ceiling`` even if no value reaches them; ``share`` stacks series."""

    key: str
    title: str
    series: tuple[Series, ...]
    table: Table
    note: str = ""
    floor: float | None = None
    ceiling: float | None = None
    share: bool = False

    def data(self) -> dict[str, Any]:
        """The data for the page's script; numbers have six digits."""
        series = [
            vars(one) | {name: [float(f"{v:.6g}") for v in getattr(one, name)] for name in ("x", "y", "lo", "hi")}
            for one in self.series
        ]
        return {name: getattr(self, name) for name in ("title", "floor", "ceiling", "share")} | {"series": series}


Points = list[tuple[float, float]]


def points(steps: Sequence[StepRecord], read: Callable[[StepRecord], float | None]) -> Points:
    """(step, value) of the steps that have a value."""
    return [(float(step.step), value) for step in steps if (value := read(step)) is not None]


def running_mean(pairs: Points, window: int) -> Points:
    """The mean over ``window`` (odd) neighbouring points; over fewer at the ends."""
    half = window // 2
    sums = [0.0]
    for _, value in pairs:
        sums.append(sums[-1] + value)
    smooth: Points = []
    for index, (x, _) in enumerate(pairs):
        low, high = max(0, index - half), min(len(pairs), index + half + 1)
        smooth.append((x, (sums[high] - sums[low]) / (high - low)))
    return smooth


def thin(label: str, style: CurveStyle, pairs: Points, colour: int = 0) -> Series:
    """A series of at most ``POINTS`` points: bucket means at mean steps, with each bucket's extremes."""
    if len(pairs) <= POINTS:
        return Series(label, style, tuple(x for x, _ in pairs), tuple(y for _, y in pairs), colour=colour)
    edges = [round(i * len(pairs) / POINTS) for i in range(POINTS + 1)]
    buckets = [list(zip(*pairs[a:b], strict=True)) for a, b in itertools.pairwise(edges)]
    x, y = (tuple(math.fsum(bucket[axis]) / len(bucket[axis]) for bucket in buckets) for axis in (0, 1))
    low, high = (tuple(extreme(ys) for _, ys in buckets) for extreme in (min, max))
    return Series(label, style, x, y, low, high, colour)


def thinned(count: int) -> str:
    if count <= POINTS:
        return ""
    return f"{count:,} steps drawn as {POINTS} means; the band is each mean's smallest to largest step."


def table(columns: dict[str, Points], always: Sequence[float] = ()) -> Table:
    """Evenly spaced steps, with the first, the last and those in ``always``."""
    lookup = {name: dict(pairs) for name, pairs in columns.items()}
    steps = sorted({x for pairs in lookup.values() for x in pairs})
    last = len(steps) - 1
    chosen = {steps[round(i * last / (ROWS - 1))] for i in range(ROWS)} if last >= ROWS else set(steps)
    chosen |= set(always)
    rows = tuple((x, *(lookup[name].get(x) for name in columns)) for x in sorted(chosen))
    note = "" if len(rows) == len(steps) else f"{len(rows)} of {len(steps):,} steps; metrics.jsonl has all."
    return Table(("step", *columns), rows, note)


def reward_chart(run: Run) -> Chart | None:
    """Training reward (each step and its running mean) and the held-out result with error bars of ± 1 s.e."""
    raw = points(run.steps, lambda step: step.reward.mean if step.reward else None)
    held = [(float(e.step), e.value, e.se or 0.0) for e in run.evaluations if e.value is not None]
    if not raw and not held:
        return None
    series: list[Series] = []
    notes: list[str] = []
    if raw:
        window = 2 * (len(raw) // 40) + 1
        if window == 1:
            series.append(thin("training", "line", raw, colour=-1))
        else:
            series.append(thin("training, each step", "faint", raw, colour=-1))
            series.append(thin("training", "line", running_mean(raw, window), colour=-1))
            notes.append(f"Training: each step faint, the mean over {window} steps as a line.")
        notes.append(thinned(len(raw)))
    if held:
        x, y, se = zip(*held, strict=True)
        lo, hi = (tuple(a - b for a, b in zip(y, se, strict=True)), tuple(a + b for a, b in zip(y, se, strict=True)))
        series.append(Series("held-out", "bars", x, y, lo, hi, colour=0))
        last = run.evaluations[-1]
        each = last.n / last.prompts if last.prompts else 0
        size = f"{last.prompts} prompts × {each:g} completions" if run.measure == "reward" else f"{last.prompts} rows"
        notes.append(f"Held-out: {size}; bars: ± 1 standard error.")
    columns = {"training": raw, "held-out": [(x, y) for x, y, _ in held], "± s.e.": [(x, se) for x, _, se in held]}
    values = [v for one in series for v in (*one.y, *one.lo, *one.hi)]
    unit = min(values) >= 0 and max(values) <= 1
    return Chart(
        "reward",
        "Mean reward" if run.measure == "reward" else f"Held-out {run.measure}",
        tuple(series),
        table({name: pairs for name, pairs in columns.items() if pairs}, always=[x for x, _, _ in held]),
        " ".join(note for note in notes if note),
        floor=0.0 if unit else None,
        ceiling=1.0 if unit and max(values) > 0.5 else None,
    )


def evaluation_charts(run: Run) -> list[Chart]:
    """One small chart per further number of the evaluations: a further task's reward, perplexity, margin."""
    charts = []
    for name in dict.fromkeys(name for e in run.evaluations for name in e.metrics):
        if (name.startswith("eval/") and name.endswith("/reward")) or name in ("heldout/perplexity", "pairs/margin"):
            found = [(float(e.step), value) for e in run.evaluations if (value := e.metrics.get(name)) is not None]
            if len(found) > 1 and (chart := small(f"evaluation.{name}", f"held-out: {name}", found, 0)):
                charts.append(chart)
    return charts


def term_labels(run: Run) -> list[str]:
    """Every term that ran, in the order of first appearance. A term has the same colour on the whole page."""
    return list(dict.fromkeys(label for step in run.steps for label in step.terms))


def share_chart(run: Run) -> Chart | None:
    """Each term's share of the gradient, stacked; None if fewer than two terms ran or none was measured."""
    labels = term_labels(run)
    measured = [step for step in run.steps if any(term.share is not None for term in step.terms.values())]
    if len(labels) < 2 or not measured:
        return None
    columns = {
        label: [(float(s.step), s.terms[label].share or 0.0 if label in s.terms else 0.0) for s in measured]
        for label in labels
    }
    note = "" if len(measured) == len(run.steps) else f"Measured on {len(measured):,} of {len(run.steps):,} steps. "
    return Chart(
        "share",
        "Share of each term in the gradient",
        tuple(thin(label, "area", pairs, colour) for colour, (label, pairs) in enumerate(columns.items())),
        table(columns),
        (note + "‖w∇L‖ of a term over the sum for all terms.").strip(),
        floor=0.0,
        ceiling=1.0,
        share=True,
    )


def loss_charts(run: Run) -> list[Chart]:
    """One small chart per term: its loss before the weight. The value of a surrogate has no meaning and no chart."""
    charts = []
    for colour, label in enumerate(term_labels(run)):
        terms = [(step.step, step.terms[label]) for step in run.steps if label in step.terms]
        found = [(float(at), term.loss) for at, term in terms if term.loss is not None and not term.surrogate]
        if chart := small(f"loss.{label}", f"{label}: loss", found, colour):
            charts.append(chart)
    return charts


@dataclass
class Named:
    """One number of the steps: its title, its values, and the colour of the term that it belongs to."""

    title: str
    colour: int
    pairs: Points


def metric_points(run: Run) -> list[Named]:
    """Every number of the steps besides reward, losses and shares, in the order of its first appearance."""
    found: dict[tuple[str, str], Named] = {}
    labels = term_labels(run)

    def add(owner: str, name: str, step: StepRecord, value: float | None, colour: int = -1) -> None:
        if value is not None:
            title = name if owner in ("", "loop") else f"{owner}: {name}"
            found.setdefault((owner, name), Named(title, colour, [])).pairs.append((float(step.step), value))

    for step in run.steps:
        add("", "gradient norm", step, step.grad_norm)
        add("", "update norm", step, step.update_norm)
        add("", "learning rate", step, step.lr)
        for label, term in step.terms.items():
            for name, value in term.metrics.items():
                add(label, name, step, value, labels.index(label))
        for name, value in step.metrics.items():
            add("loop", name, step, value)
        for name, value in step.seconds.items():
            add("seconds", name, step, value)
        add("", "micro-batches", step, step.micro_batches)
        if step.tokens and (seconds := sum(value or 0.0 for value in step.seconds.values())):
            add("", "tokens per second", step, step.tokens / seconds)
    return list(found.values())


UNCHANGED_BELOW = 1e-4
"""A number that changes by less than this fraction of its size gets no chart, which would magnify rounding."""


@dataclass(frozen=True)
class Unchanged:
    """A number that did not change (``exact``), or only by rounding."""

    title: str
    value: float
    exact: bool


def metric_charts(run: Run) -> tuple[list[Chart], list[Unchanged]]:
    """Charts of the numbers that change, and the values of those that do not."""
    charts: list[Chart] = []
    unchanged: list[Unchanged] = []
    for index, one in enumerate(metric_points(run)):
        values = [value for _, value in one.pairs]
        low, high = min(values), max(values)
        if len(values) > 1 and high - low <= UNCHANGED_BELOW * max(abs(low), abs(high)):
            unchanged.append(Unchanged(one.title, values[-1], low == high))
        elif chart := small(f"metric.{index}", one.title, one.pairs, one.colour):
            charts.append(chart)
    return charts, unchanged


def small(key: str, title: str, pairs: Points, colour: int) -> Chart | None:
    """A chart with one line, labelled with the chart's name."""
    if not pairs:
        return None
    name = title.split(": ")[-1]
    return Chart(key, title, (thin(name, "line", pairs, colour),), table({name: pairs}), thinned(len(pairs)))
