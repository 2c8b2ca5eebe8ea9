"""The part of an engine that signals need, and its requests. Shapes: N active tokens, K tokens per position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from jaxtyping import Int
from torch import Tensor

from earnest.models.protocol import PolicyLike
from earnest.signals.batch import Batch
from earnest.signals.distributions import Distribution

Who = Literal["live", "base", "previous"]
"""The current policy; the policy without any adapter; the policy with frozen adapters but without the trained one."""


@dataclass(frozen=True)
class LogProbsWanted:
    """Exact log-probs of the targets → [N]."""

    temperature: float = 1.0


@dataclass(frozen=True)
class TopKWanted:
    """The k most probable tokens and the log of the remaining mass → ``TopK``."""

    k: int


@dataclass(frozen=True, eq=False)
class AtIdsWanted:
    """Log-probs at given token ids → [N, K]."""

    ids: Int[Tensor, "N K"]


@dataclass(frozen=True)
class HiddenWanted:
    """Last hidden states → ``Hidden``: the whole distribution in d numbers per token."""


@dataclass(frozen=True)
class LogitsWanted:
    """Every logit → ``FullLogits``: N·V numbers, for small vocabularies and for tests."""


Wanted = LogProbsWanted | TopKWanted | AtIdsWanted | HiddenWanted | LogitsWanted


class Scorer(Protocol):
    """Scores a batch's targets under the live policy or one of its references."""

    @property
    def policy(self) -> PolicyLike: ...

    def score(self, batch: Batch, want: Wanted, policy: Who = "live") -> Tensor | Distribution: ...


def logprobs(engine: Scorer, batch: Batch, policy: Who) -> Tensor:
    """Exact log-probs of the targets, at the batch's sampling temperature."""
    found = engine.score(batch, LogProbsWanted(batch.temperature), policy)
    assert isinstance(found, Tensor)
    return found


def distribution(engine: Scorer, batch: Batch, policy: Who) -> Distribution:
    """The whole distribution: as hidden states, or as logits if the head is trained or has an adapter."""
    found = engine.score(batch, HiddenWanted() if engine.policy.head.fixed else LogitsWanted(), policy)
    assert not isinstance(found, Tensor)
    return found
