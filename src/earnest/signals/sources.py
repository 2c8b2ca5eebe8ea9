"""Other policies on the tokens of a batch: a teacher, a reference. Shapes: N active tokens, M covered ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.errors import SignalError
from earnest.signals.distributions import Distribution, check_logprobs, derived


@dataclass(frozen=True, eq=False)
class Teacher:
    """A distribution for the active tokens ``at`` (None: for all of them), in their order.

    ``kind`` names the teacher ("live", "base", "ema", …); a teacher has its own prompt, so it cannot be
    recomputed from ``Batch.inputs``. ``logprobs`` are its exact log-probs of the batch's targets, not values from a
    ``TopK``.
    """

    distribution: Distribution
    at: Int[Tensor, " M"] | None = None
    kind: str = "given"
    logprobs: Float[Tensor, " M"] | None = None

    def __post_init__(self) -> None:
        if self.logprobs is not None:
            if tuple(self.logprobs.shape) != (len(self.distribution),):
                raise SignalError(
                    f"Teacher.logprobs must have shape [{len(self.distribution)}], one per token that the "
                    f"teacher covers, got {tuple(self.logprobs.shape)}."
                )
            check_logprobs("Teacher.logprobs", self.logprobs)
        if self.at is not None and len(self.distribution) != self.at.shape[0]:
            raise SignalError(
                f"the teacher has {len(self.distribution)} token distributions for {self.at.shape[0]} positions; give "
                "one each."
            )

    def take(self, order: Int[Tensor, " n"], total: int) -> Teacher:
        """The teacher of the active tokens ``order`` of ``total``, in that order."""
        at = torch.arange(total, device=order.device) if self.at is None else self.at
        place = torch.full((total,), -1, device=order.device)
        place[at] = torch.arange(at.shape[0], device=order.device)
        kept = place[order]
        new_at = (kept >= 0).nonzero()[:, 0]
        own = kept[new_at]
        logprobs = None if self.logprobs is None else self.logprobs[own]
        return derived(self, distribution=self.distribution.take(own), at=new_at, logprobs=logprobs)


@dataclass(frozen=True, eq=False)
class Reference:
    """The reference policy π₀ on the batch's own rows: exact log-probs of the targets, and a distribution if one is
    needed.

    ``logprobs`` are at the batch's sampling temperature, like ``Batch.behaviour``; the distribution is at temperature
    1.
    """

    logprobs: Float[Tensor, " N"] | None = None
    distribution: Distribution | None = None
    kind: str = "base"
    at: ClassVar[None] = None
    """A reference covers every active token."""

    def take(self, order: Int[Tensor, " n"]) -> Reference:
        """The reference of the active tokens ``order``, in that order."""
        logprobs = None if self.logprobs is None else self.logprobs[order]
        distribution = None if self.distribution is None else self.distribution.take(order)
        return derived(self, logprobs=logprobs, distribution=distribution)
