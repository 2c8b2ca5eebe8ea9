"""Another policy's distribution of the next token, in one of three forms.

``FullLogits`` holds every logit, ``Hidden`` the input of the policy's own head (so the vocabulary is never stored),
``TopK`` the response of a remote service: K log-probabilities and the log of the remaining mass.
Shapes: M tokens, V vocabulary, d width, K kept tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.errors import SignalError

# A log-probability may exceed 0 only by rounding; a larger value is another quantity.
LOGPROB_SLACK = 1e-4

D = TypeVar("D")


def derived(value: D, **changes: Any) -> D:
    """A copy of a frozen dataclass with values of a validated one. ``__post_init__`` does not run, because on a GPU
    every check of values waits for the device."""
    made = object.__new__(type(value))
    names = value.__dataclass_fields__  # type: ignore[attr-defined]
    assert changes.keys() <= names.keys(), f"{type(value).__name__} has no {sorted(changes.keys() - names.keys())}"
    made.__dict__.update({name: changes.get(name, getattr(value, name)) for name in names})
    return made


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
    """Last hidden states; ``head(states)`` are the logits, with the head of the trained policy."""

    states: Float[Tensor, "M d"]

    def __len__(self) -> int:
        return self.states.shape[0]

    def take(self, index: Int[Tensor, " m"]) -> Hidden:
        return Hidden(self.states[index])


@dataclass(frozen=True, eq=False)
class TopK:
    """K log-probabilities per token, and ``tail`` = log(1 - their sum).

    ``tail`` is -inf if K is the whole vocabulary.
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

    def take(self, index: Int[Tensor, " m"] | slice) -> TopK:
        return derived(self, ids=self.ids[index], logprobs=self.logprobs[index], tail=self.tail[index])


class ScoredAt(TopK):
    """A ``TopK`` at the student's top K ids at the time when the batch was made. A plain ``TopK`` has the top K ids of
    the source."""


Distribution = FullLogits | Hidden | TopK


def check_logprobs(name: str, values: Tensor) -> None:
    """Refuse values that cannot be log-probabilities: NaN, +inf, or above 0 by more than rounding."""
    top = float(values.detach().max()) if values.numel() else 0.0  # NaN if any value is NaN
    if top != top:
        raise SignalError(
            f"{name} has {int(torch.isnan(values).sum())} NaN values; recompute them before training on them."
        )
    slack = LOGPROB_SLACK if values.dtype in (torch.float32, torch.float64) else 0.05
    if top > slack:
        raise SignalError(
            f"{name} has a value of {top:.4g}, but a log-probability is at most 0; "
            "pass log π(token), not a probability, a ratio or a negated loss."
        )
