"""The log-probs and distributions that only the engine can supply, filled in where an objective asks for them.

The reference is the policy's own weights with gates at 0: no second model, and nothing that training moves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from earnest.errors import SignalError
from earnest.signals.batch import Batch, Reference
from earnest.signals.scorer import Scorer, distribution, logprobs

if TYPE_CHECKING:
    from earnest.objectives.base import Objective, Term


def wanted_signals(objective: Objective | Term) -> frozenset[str]:
    """Every signal that a live term needs."""
    from earnest.objectives.base import Objective  # objectives know signals; here the other way round, late

    return frozenset(signal for w in Objective.of(objective).live() for signal in w.term.signals())


def reference_kind(objective: Objective | Term) -> str:
    """Whose numbers the live terms' reference signals are; a batch carries one reference, so they must agree."""
    from earnest.objectives.base import Objective

    kinds = {
        w.term.label: w.term.reference_kind
        for w in Objective.of(objective).live()
        if any(signal.startswith("reference.") for signal in w.term.signals())
    }
    if len(set(kinds.values())) > 1:
        shown = ", ".join(f"{label}: {kind}" for label, kind in kinds.items())
        raise SignalError(
            f"the terms are held against different policies ({shown}), and a batch carries one reference; "
            "give them the same one."
        )
    return next(iter(kinds.values()), "base")


def with_reference(engine: Scorer, batch: Batch, objective: Objective | Term) -> Batch:
    """The batch with what the live terms need of the reference policy, and of the trainer at sampling time.

    The reference is the base (every gate at 0) or the previous round (the trained adapter's gate at 0, frozen history
    on). What the batch already carries is kept, whoever made it; another reference than the terms want is left as it
    is. A signal that is still missing afterwards is reported by the objective's check, with the term's name.
    """
    wanted, kind = wanted_signals(objective), reference_kind(objective)
    reference = batch.reference or Reference(kind=kind)
    if reference.kind == kind:
        if "reference.logprobs" in wanted and reference.logprobs is None:
            reference = replace(reference, logprobs=logprobs(engine, batch, kind))
        if "reference.distribution" in wanted and reference.distribution is None:
            reference = replace(reference, distribution=distribution(engine, batch, kind))
    if reference.logprobs is not None or reference.distribution is not None:
        batch = batch.with_signals(reference=reference)
    if "proximal" in wanted and batch.proximal is None:
        batch = batch.with_signals(proximal=logprobs(engine, batch, "live"))
    return batch
