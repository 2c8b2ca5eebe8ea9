"""What an asynchronous run gained and what it cost: waiting, the age of what was trained, and the ratios."""

from __future__ import annotations

from collections.abc import Sequence

from earnest.report.blocks import row, section, table
from earnest.report.markup import Html, el, number
from earnest.report.record import Run

NAMES = {
    "trainer/idle": "share of the time that the trainer waited",
    "sampler/idle": "share of the time that samplers waited",
    "sampler/age": "age of the tokens in versions, mean",
    "sampler/age_max": "age of the tokens in versions, largest of a step",
    "sampler/continued": "share of completions that continued under new weights",
    "sampler/queue": "batches that were ready when the trainer asked",
    "sampler/again": "parts that were sampled more than once, so far",
    "sampler/restarts": "samplers that were started again, so far",
}

COLUMNS = ("per step", "mean", "smallest", "largest")


def section_of(run: Run) -> Html | None:
    """The section, or None for a run that samples and trains in turns."""
    if not any("sampler/age" in step.metrics for step in run.steps):
        return None
    rows = [
        _row(text, [v for s in run.steps if (v := s.metrics.get(name)) is not None], share="share" in text)
        for name, text in NAMES.items()
    ]
    for metric, text in (("ratio", "ratio to the weights that sampled, mean"), ("ratio_max", "largest ratio")):
        values = [v for s in run.steps for t in s.terms.values() if (v := t.metrics.get(metric)) is not None]
        rows.append(_row(text, values))
    lead = (
        f"Samplers worked while the trainer trained, so a step was trained on tokens of older weights. {_gain(run)} "
        "The ratios compare the trained weights with those that sampled: the further they are from 1, the more the "
        "older tokens cost."
    )
    return section("samplers", "Samplers", el("p", lead), table("Samplers", COLUMNS, rows))


def _gain(run: Run) -> str:
    """How much longer the same work takes in turns. A step counts by its seconds."""
    steps = [s for s in run.steps if s.metrics.get("trainer/idle") is not None]
    spans = [sum(v or 0.0 for v in s.seconds.values()) for s in steps]
    total = sum(spans)
    if not total:
        return "No times were recorded."
    trained, sampled = (
        sum(span * (1 - (s.metrics.get(name) or 0.0)) for s, span in zip(steps, spans, strict=True)) / total
        for name in ("trainer/idle", "sampler/idle")
    )
    worked = f"The trainer worked {trained:.0%} of the time and the mean sampler {sampled:.0%}"
    if trained + sampled <= 1:
        return f"{worked}, so no time was gained."
    return f"{worked}; one after the other, the same work would take {trained + sampled:.2f} times as long."


def _row(text: str, values: Sequence[float], *, share: bool = False) -> Html | None:
    if not values:
        return None
    shown = (sum(values) / len(values), min(values), max(values))
    return row(text, *(f"{value:.1%}" if share else number(value, 3) for value in shown))
