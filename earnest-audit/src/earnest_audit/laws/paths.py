"""DF: Two paths that claim the same objective have the same gradient.

Needs: paths={name: function} or backward=fn
How: Both gradients from a perturbed, off-policy state, where no term is at its zero.
Exceptions: Only this law, or the written formula, detects a constant factor.
Detects: Liger #1082, verl #1440 and #2016, transformers #26221
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from earnest_audit.law import Law, Rows
from earnest_audit.probe import Probe
from earnest_audit.step import Backward, Loss

PERTURBATIONS = (0.05, 0.1, 0.2)


def check(probe: Probe) -> Rows:
    step = probe.step
    own = {} if step.backward is None else {"the run's own backward pass": Backward(step.backward)}
    for name, path in {**own, **step.paths}.items():
        change, why = _backward(probe, path.fn) if isinstance(path, Backward) else _loss(probe, path)
        yield probe.same(f"path {name}", change, f"{name} {why}", what="its gradient differs by {}")


def _backward(probe: Probe, backward: Callable[[Mapping[str, Any]], Any]) -> tuple[float, str]:
    """In 16 bits a token at the very edge of a clip may fall on either side of it, but not in several states."""
    change = math.inf
    states: list[AbstractContextManager[None]] = [nullcontext()]
    for state in states + [probe.perturbed(size) for size in PERTURBATIONS if probe.coarse]:
        if change > probe.tolerance:
            with state:
                change = min(change, probe.gradient().distance(probe.own_gradient(backward=backward)))
    why = "a hand-written derivative, an accumulation over micro-batches or a fused kernel is wrong."
    return change, f"gives another gradient than the loss's autograd: {why}"


def _loss(probe: Probe, other: Loss) -> tuple[float, str]:
    with probe.perturbed():
        base = probe.off_policy()
        origin, theirs = probe.gradient(base), probe.gradient(base, loss=other)
        factor = theirs.best_scale(origin)
        if theirs.distance(origin.times(factor)) <= probe.tolerance:
            why = f"is {factor:.3g} times the other: a normaliser or a factor was lost."
        else:
            why = "computes another objective: an argument that the other path reads is missing, or an option is off."
    return origin.distance(theirs), why


LAW = Law("DF", "paths", __doc__, check, asks=(
    ("other paths", "paths={name: another function with the loss's signature}",
     lambda step: bool(step.paths) or step.backward is not None),
))  # fmt: skip
