"""DR: A step along minus a term's own gradient lowers the metric that the term is about.

Needs: terms, and their metrics in what the step returns
How: The term's gradient is the difference between two weights; after one small step along it the metric is measured
again.
Exceptions: An entropy bonus raises its metric: declare Raises(setting).
Detects: sign errors, swapped chosen and rejected, a step that moves away as in torchft #233
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from earnest.audit import edits
from earnest.audit.law import Law
from earnest.audit.probe import Probe
from earnest.audit.step import Raises
from earnest.audit.verdict import Finding


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    if not step.terms:
        yield LAW.not_declared("terms", "terms={metric: setting that weighs it}")
        return
    with probe.perturbed():
        batch = probe.off_policy()
        for metric, term in step.terms.items():
            knob = step.weights[metric]
            wanted = +1 if isinstance(term, Raises) else -1
            weight = float(step.knobs[knob]) or 1.0
            own = probe.gradient(batch, {knob: 2 * weight}).minus(probe.gradient(batch, {knob: 0.0}))
            size = own.norm()
            if size == 0:
                continue  # see KG
            before = probe.look(batch).metrics.get(metric)
            after = _after(probe, batch, own.parts, size, metric)
            if before is None or after is None:
                yield LAW.finding(
                    f"term {metric}", "its metric is not returned", "returned", False, f"Return {metric!r} as a metric."
                )
                continue
            change = after - before
            if change * wanted <= 0:  # a set that the metric is taken over (a top-k) may jump on one side
                change = (after - (_after(probe, batch, own.parts, -size, metric) or before)) / 2
            yield LAW.finding(
                f"term {metric}",
                f"descending it changed {metric} by {change:+.2g}",
                "it rises" if wanted > 0 else "it falls",
                change * wanted > 0,
                f"Minimising the loss moves {metric} the wrong way: a sign is flipped, or two roles are swapped.",
            )


def _after(probe: Probe, batch: edits.Batch, parts: object, size: float, metric: str) -> float | None:
    assert isinstance(parts, dict)
    total = sum(float(p.detach().double().square().sum()) for p in probe.parameters.values()) ** 0.5
    kept = {n: p.detach().clone() for n, p in probe.parameters.items()}
    with torch.no_grad():
        for name, p in probe.parameters.items():
            if parts[name] is not None:
                p.sub_((parts[name].double() * (3e-3 * max(total, 1e-2) / size)).to(p.dtype))
        found = probe.look(dict(batch)).metrics.get(metric)
        for name, p in probe.parameters.items():
            p.copy_(kept[name])
    return found


LAW = Law.of("DR", "direction", __doc__, check, quick=False)
