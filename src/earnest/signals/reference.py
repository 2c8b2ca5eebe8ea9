"""The log-probs and distributions that only the engine can supply, filled in where an objective asks for them.

The reference is the policy's own weights with the adapter's gate at 0: no second model, and nothing that training
moves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from earnest.signals.batch import Batch, Reference
from earnest.signals.scorer import Scorer, distribution, logprobs

if TYPE_CHECKING:
    from earnest.objectives.base import Objective, Term


def wanted_signals(objective: Objective | Term) -> frozenset[str]:
    """Every signal that a live term needs."""
    from earnest.objectives.base import Objective  # objectives know signals; here the other way round, late

    return frozenset(signal for w in Objective.of(objective).live() for signal in w.term.signals())


def with_reference(engine: Scorer, batch: Batch, objective: Objective | Term) -> Batch:
    """The batch with what the live terms need of the base policy, and of the trainer at sampling time.

    What the batch already carries is kept, whoever made it. A signal that is still missing afterwards is reported by
    the objective's check, with the term's name.
    """
    wanted = wanted_signals(objective)
    reference = batch.reference or Reference()
    if "reference.logprobs" in wanted and reference.logprobs is None:
        reference = replace(reference, logprobs=logprobs(engine, batch, "base"))
    if "reference.distribution" in wanted and reference.distribution is None:
        reference = replace(reference, distribution=distribution(engine, batch, "base"))
    if reference.logprobs is not None or reference.distribution is not None:
        batch = batch.with_signals(reference=reference)
    if "proximal" in wanted and batch.proximal is None:
        batch = batch.with_signals(proximal=logprobs(engine, batch, "live"))
    return batch
