"""DF: Two paths that claim the same objective have the same gradient.

Needs: paths={name: function} or backward=fn
How: Both gradients from a perturbed, off-policy state, where no term is at its zero.
Exceptions: Only this law, or the written formula, detects a constant factor.
Detects: Liger #1082, verl #1440 and #2016, transformers #26221
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from earnest_audit.law import Law, Rows
from earnest_audit.probe import Probe
from earnest_audit.step import Backward

PERTURBATIONS = (0.05, 0.1, 0.2)


def check(probe: Probe) -> Rows:
    step = probe.step
    passes = {name: path.fn for name, path in step.paths.items() if isinstance(path, Backward)}
    losses = {name: path for name, path in step.paths.items() if not isinstance(path, Backward)}
    if step.backward is not None:
        passes = {"the run's own backward pass": step.backward, **passes}
    for name, backward in passes.items():
        yield probe.same(
            f"path {name}", _backward(probe, backward),
            f"{name} gives another gradient than the loss's autograd: a hand-written derivative, an accumulation over "
            "micro-batches or a fused kernel is wrong.",
            what="its gradient differs by {}",
        )  # fmt: skip
    if not losses:
        return
    with probe.perturbed():
        base = probe.off_policy()
        origin = probe.gradient(base)
        for name, other in losses.items():
            theirs = probe.gradient(base, loss=other)
            factor = theirs.best_scale(origin)
            constant = theirs.distance(origin.times(factor)) <= probe.tolerance
            yield probe.same(
                f"path {name}", origin.distance(theirs),
                f"{name} is {factor:.3g} times the other: a normaliser or a factor was lost." if constant else
                f"{name} computes another objective: an argument that one path reads is missing in the other, or an "
                "option is off.",
                what="its gradient differs by {}",
            )  # fmt: skip


def _backward(probe: Probe, backward: Callable[[Mapping[str, Any]], Any]) -> float:
    """The difference. In 16 bits a token at the very edge of a clip may fall on either side of it, but not in several
    states."""

    def difference() -> float:
        return probe.gradient().distance(probe.own_gradient(backward=backward))

    change = difference()
    for size in PERTURBATIONS if probe.coarse else ():
        if change > probe.tolerance:
            with probe.perturbed(size):
                change = min(change, difference())
    return change


LAW = Law("DF", "paths", __doc__, check, asks=(
    ("other paths", "paths={name: another function with the loss's signature}",
     lambda step: bool(step.paths) or step.backward is not None),
))  # fmt: skip
