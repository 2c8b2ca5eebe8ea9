"""What signals ask of an engine. ``LocalEngine`` has it; so has anything else that can score a batch."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from earnest.signals.batch import Batch
from earnest.signals.distributions import Distribution


class Scorer(Protocol):
    """Scores a batch's targets under the live policy or the base (the same weights, the adapter's gate at 0)."""

    @property
    def policy(self) -> Any: ...

    @property
    def adapter(self) -> Any: ...

    def score(self, batch: Batch, want: Any, policy: Any = "live") -> Tensor | Distribution: ...


def logprobs(engine: Scorer, batch: Batch, policy: str) -> Tensor:
    """Exact log-probs of the targets, at the batch's sampling temperature."""
    from earnest.engines.base import LogProbsWanted  # engines know signals; here the other way round, late

    found = engine.score(batch, LogProbsWanted(batch.temperature), policy)
    assert isinstance(found, Tensor)
    return found


def distribution(engine: Scorer, batch: Batch, policy: str) -> Distribution:
    """The whole distribution: as hidden states, unless an adapter sits on the head (then the head is not shared)."""
    from earnest.engines.base import HiddenWanted, LogitsWanted

    found = engine.score(batch, HiddenWanted() if engine.policy.head.plain else LogitsWanted(), policy)
    assert not isinstance(found, torch.Tensor)
    return found
