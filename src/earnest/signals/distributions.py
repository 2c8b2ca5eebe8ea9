"""What another policy thinks of a token, as one of three things that can be at hand.

``FullLogits`` holds every logit, ``Hidden`` the state in front of the policy's own head (so the vocabulary never has
to be stored), ``TopK`` what a remote service sends: K log-probabilities and the log of the mass that they leave out.
Shapes: M tokens, V vocabulary, d width, K kept tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.errors import SignalError

# A log-probability may exceed 0 by rounding only; beyond this it is another quantity under that name.
LOGPROB_SLACK = 1e-4


@dataclass(frozen=True, eq=False)
class FullLogits:
    """All logits of every token; they need not be normalised."""

    logits: Float[Tensor, "M V"]

    def __len__(self) -> int:
        return self.logits.shape[0]

    def take(self, index: Int[Tensor, " m"]) -> FullLogits:
        return FullLogits(self.logits[index])


@dataclass(frozen=True, eq=False)
class Hidden:
    """Last hidden states; ``head(states)`` are the logits, with the same head as the policy that is trained."""

    states: Float[Tensor, "M d"]

    def __len__(self) -> int:
        return self.states.shape[0]

    def take(self, index: Int[Tensor, " m"]) -> Hidden:
        return Hidden(self.states[index])


@dataclass(frozen=True, eq=False)
class TopK:
    """K log-probabilities a token, and ``tail`` = log(1 - their sum).

    ``tail`` is -inf where K is the whole vocabulary.
    """

    ids: Int[Tensor, "M K"]
    logprobs: Float[Tensor, "M K"]
    tail: Float[Tensor, " M"]

    def __post_init__(self) -> None:
        if self.ids.shape != self.logprobs.shape or self.ids.ndim != 2:
            raise SignalError(
                f"TopK needs ids and logprobs of one shape [M, K], got {tuple(self.ids.shape)} and "
                f"{tuple(self.logprobs.shape)}."
            )
        if self.tail.shape != self.ids.shape[:1]:
            raise SignalError(f"TopK.tail must have shape [{self.ids.shape[0]}], got {tuple(self.tail.shape)}.")
        check_logprobs("TopK.logprobs", self.logprobs)

    def __len__(self) -> int:
        return self.ids.shape[0]

    def take(self, index: Int[Tensor, " m"]) -> TopK:
        return replace(self, ids=self.ids[index], logprobs=self.logprobs[index], tail=self.tail[index])


class ScoredAt(TopK):
    """A ``TopK`` whose ids the student chose (its own top K when the batch was made), and at which the source was
    scored.

    So the support is the student's; a plain ``TopK`` has the ids of the source.
    """


Distribution = FullLogits | Hidden | TopK


def check_logprobs(name: str, values: Tensor) -> None:
    """Refuse what cannot be a log-probability: NaN, +inf, or a value above 0 beyond rounding."""
    if torch.isnan(values).any():
        raise SignalError(
            f"{name} has {int(torch.isnan(values).sum())} NaN values; recompute them before training on them."
        )
    top = float(values.detach().max()) if values.numel() else 0.0
    slack = LOGPROB_SLACK if values.dtype in (torch.float32, torch.float64) else 0.05
    if top > slack:
        raise SignalError(
            f"{name} has a value of {top:.4g}, but a log-probability is at most 0; "
            "pass log π(token), not a probability, a ratio or a negated loss."
        )
