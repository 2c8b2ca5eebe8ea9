"""DR: A step along minus a term's own gradient lowers the metric that the term is about.

Needs: metrics={name: Metric(weight=setting)}, returned by the step
How: The term's gradient is the difference between two weights; after one small step along it the metric is measured
again.
Exceptions: An entropy bonus raises its metric: declare Metric(weight=setting, raises=True).
Detects: sign errors, swapped chosen and rejected, a step that moves away as in torchft #233
"""

from __future__ import annotations

from earnest_audit.gradient import Gradient
from earnest_audit.law import Law, Rows
from earnest_audit.probe import Probe

STEP = 3e-3  # of the parameters' norm


def check(probe: Probe) -> Rows:
    step, batch = probe.step, probe.off_policy()
    for metric, knob in step.weights.items():
        wanted = +1 if step.facts[metric].raises else -1
        weight = float(step.knobs[knob]) or 1.0
        own = probe.gradient(batch, {knob: 2 * weight}).minus(probe.gradient(batch, {knob: 0.0}))
        if own.norm() == 0:
            continue  # see KG

        def after(length: float, own: Gradient = own, metric: str = metric) -> float | None:
            with probe.along(own, probe.reach(length)):
                return probe.look(dict(batch)).metrics.get(metric)

        before, there = probe.look(batch).metrics.get(metric), after(-STEP)
        if before is None or there is None:
            continue  # see MR
        change = there - before
        if change * wanted <= 0:  # a set that the metric is taken over (a top-k) may jump on one side
            change = (there - (after(STEP) or before)) / 2
        yield LAW.finding(
            f"term {metric}", f"descending it changed {metric} by {change:+.2g}",
            "it rises" if wanted > 0 else "it falls", change * wanted > 0,
            f"Minimising the loss moves {metric} the wrong way: a sign is flipped, or two roles are swapped.",
        )  # fmt: skip


LAW = Law(
    "DR", "direction", __doc__, check, quick=False, perturbed=True, spare=1 / 3,
    asks=(("terms", "metrics={name: Metric(weight=the setting that weighs it)}", lambda step: bool(step.weights)),),
)  # fmt: skip
