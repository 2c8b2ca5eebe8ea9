"""MR-SUM: Terms that are declared to be the whole loss add up to it.

L = Σ weight·term + Σ fixed terms

Needs: metrics={name: Metric(weight=…)} for every term: the setting that weighs it, or 1.0
How: Loss and metrics of the perturbed step, which are known already. Then each term by itself: what a thousand times
its weight adds to the loss.
Exceptions: A metric with another normaliser than its term does not add up; then declare no weight of 1.0.
Detects: mlx-lm-lora #65 (ORPO without its likelihood, which is logged)
"""

from __future__ import annotations

from collections.abc import Iterator

from earnest_audit.law import Law
from earnest_audit.limits import ROUNDED, STRONG
from earnest_audit.probe import Probe
from earnest_audit.step import Raises
from earnest_audit.verdict import Finding


def check(probe: Probe) -> Iterator[Finding]:
    step, reading, subject = probe.step, probe.read(), "the sum of the terms"
    weights = dict.fromkeys(step.fixed, 1.0)
    for metric, term in step.terms.items():
        weights[metric] = -float(step.knobs[term.knob]) if isinstance(term, Raises) else float(step.knobs[term])
    missing = [m for m in weights if m not in reading.metrics]
    if missing:
        what = f"{missing[0]!r} is not returned"
        yield LAW.finding(subject, what, "returned", False, f"Return {missing[0]!r} as a metric.")
        return
    parts = {m: w * reading.metrics[m] for m, w in weights.items()}
    total, scale = sum(parts.values()), max([abs(reading.loss), *map(abs, parts.values())])
    room = max(ROUNDED, probe.coarsest) * scale
    sums = " + ".join(f"{v:.4g} ({m})" for m, v in parts.items())
    yield LAW.finding(
        subject, f"{sums} = {total:.4g}, the loss is {reading.loss:.4g}", f"equal, up to {room:.1g}",
        abs(total - reading.loss) <= room,
        "The declared terms do not add up to the loss: one is logged and not trained, is weighed twice, or another one "
        "is in the loss.",
    )  # fmt: skip
    for metric, knob in step.weights.items():
        try:
            yield _alone(probe, metric, knob, reading.metrics[metric])
        except Exception:
            continue  # the step refuses such a weight, as it may


def _alone(probe: Probe, metric: str, knob: str, value: float) -> Finding:
    """What the term adds to the loss, per unit of its weight: in the whole sum a small weight would hide it."""
    weight = STRONG * (float(probe.step.knobs[knob]) or 1.0)
    there, without = probe.look(None, {knob: weight}).loss, probe.look(None, {knob: 0.0}).loss
    own = (there - without) / weight * (-1 if isinstance(probe.step.terms[metric], Raises) else 1)
    grain = 16 * probe.coarsest * max(abs(there), abs(without)) / abs(weight)
    room = max(ROUNDED, probe.coarsest) * max(abs(own), abs(value)) + grain
    return LAW.finding(
        f"term {metric} by itself", f"it adds {own:.4g} per unit of {knob}, the metric is {value:.4g}",
        f"equal, up to {room:.1g}", abs(own - value) <= room,
        f"What {knob} weighs is not what is logged as {metric}: another sign, mask or normaliser, or another term.",
    )  # fmt: skip


LAW = Law("MR-SUM", "sums", __doc__, check, when=lambda step: bool(step.fixed), perturbed=True)
