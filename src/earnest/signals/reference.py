"""The log-probs and distributions that an objective reads and only the engine can supply.

The reference is the policy itself with gates at 0. It needs no second model, and training does not change it.
"""

from __future__ import annotations

from dataclasses import replace

from earnest.signals.baseline import kl_baseline
from earnest.signals.batch import Batch, Reference
from earnest.signals.scorer import Scorer, distribution, logprobs
from earnest.signals.wants import Wanting, Wants


def with_reference(engine: Scorer, batch: Batch, objective: Wanting | Wants) -> Batch:
    """The batch with the signals of the reference policy and of the trainer at sampling time that live terms read.

    The reference is the base (every gate at 0) or the previous round (the trained adapter's gate at 0, frozen adapters
    on). Signals that the batch already has are kept, also another reference than the wanted one. The objective's
    check reports a signal that is still missing, with the term's name.
    """
    wants = objective if isinstance(objective, Wants) else objective.wants()
    wanted, kind = wants.signals, wants.reference
    reference = batch.reference or Reference(kind=kind)
    if reference.kind == kind:
        if "reference.logprobs" in wanted and reference.logprobs is None:
            reference = replace(reference, logprobs=logprobs(engine, batch, kind))
        if "reference.distribution" in wanted and reference.distribution is None:
            reference = replace(reference, distribution=distribution(engine, batch, kind))
    changes: dict[str, object] = {}
    if reference is not batch.reference and (reference.logprobs is not None or reference.distribution is not None):
        changes["reference"] = reference
    if "kl_baseline" in wanted and batch.kl_baseline is None:
        changes["kl_baseline"] = kl_baseline(engine, batch, kind)
    if "proximal" in wanted and batch.proximal is None:
        changes["proximal"] = logprobs(engine, batch, "live")
    return batch.with_signals(**changes) if changes else batch
