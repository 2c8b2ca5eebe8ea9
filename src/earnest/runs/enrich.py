"""The signals that only an engine can supply: what the objective's live terms ask for, and nothing else."""

from __future__ import annotations

from torch import Tensor

from earnest.engines import LocalEngine
from earnest.engines.base import LogProbsWanted
from earnest.objectives import Objective
from earnest.signals import Batch


def with_signals(engine: LocalEngine, batch: Batch, objective: Objective) -> Batch:
    """The batch with the trainer's own log-probs at sampling time, where a term corrects for the sampler's.

    A signal that is still missing is reported by the objective's check, with the term's name.
    """
    wanted = {signal for w in objective.live() for signal in w.term.signals()}
    if "proximal" in wanted and batch.proximal is None:
        found = engine.score(batch, LogProbsWanted(batch.temperature))
        assert isinstance(found, Tensor)
        batch = batch.with_signals(proximal=found)
    return batch
