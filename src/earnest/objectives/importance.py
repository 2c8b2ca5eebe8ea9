"""Truncated importance sampling between the program that samples and the program that trains.

    w = exp(q_prox - q_behaviour),  loss ← sg[clip or mask(w)] · loss

q_behaviour are the sampler's log-probs; q_prox are the trainer's log-probs of the same tokens with the same weights. If
the two programs agree, w is 1. ``truncate`` (Yao et al. 2025, "Your efficient RL framework secretly brings you
off-policy training") bounds w, ``mask`` (MIS, Liu & Li et al. 2025) drops tokens outside the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from earnest.errors import EarnestError, ObjectiveError
from earnest.objectives.metrics import Max, Mean, Metric, Sum
from earnest.objectives.view import View
from earnest.settings import Checked, setting


@dataclass(frozen=True, kw_only=True)
class TruncatedIS(Checked):
    """The correction's bound, level and mode. It needs the batch's ``proximal`` and ``behaviour`` log-probs."""

    error: ClassVar[type[EarnestError]] = ObjectiveError

    cap: float = setting(2.0, "the largest weight that is allowed", above=0.0)
    floor: float = setting(0.0, "the smallest weight that is allowed", at_least=0.0)
    level: str = setting(
        "token", "one weight per token, or one per sequence: exp of the summed log-ratio", choices=("token", "sequence")
    )
    mode: str = setting(
        "truncate", "clamp a weight outside the bounds, or drop its tokens", choices=("truncate", "mask")
    )

    def validate(self) -> None:
        if self.floor >= self.cap:
            raise ObjectiveError(f"TruncatedIS: floor {self.floor} must be below cap {self.cap}.")

    def weights(self, view: View) -> tuple[Float[Tensor, " n"], dict[str, Metric]]:
        """sg[w] for every token, and metrics of the weights outside the bounds."""
        log_weight = view.proximal.detach() - view.behaviour.detach()
        if self.level == "sequence":
            log_weight = view.row_sum(log_weight)[view.segment]
        weight = log_weight.exp()
        outside = (weight > self.cap) | (weight < self.floor)
        metrics: dict[str, Metric] = {
            "is_weight": Mean.of(weight),
            "is_weight_max": Max.of(weight),
            "is_cut": Mean.of(outside),
        }
        if self.mode == "truncate":
            return weight.clamp(self.floor, self.cap), metrics
        metrics["dropped_tokens"] = Sum(float(outside.sum()))
        return weight.masked_fill(outside, 0.0), metrics
