"""Policy gradients with one ratio per sequence.

    s_i = exp(mean_t(lp - q)),   ℓ_i = -min(s_i A_i, clip(s_i, 1-ε, 1+ε_high)·A_i)

GSPO's token form replaces s_i by sg[s_i]·exp(lp_t - sg[lp_t]): the same gradient if a sequence has one advantage.
Use it if the advantages differ within a sequence. LUSPO multiplies each sequence's loss by its length.

Under a token-level importance correction w_t the two forms differ: the sequence form multiplies s_i·A_i by mean_t(w_t),
the token form multiplies each token's gradient by its own w_t.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from earnest.errors import SignalError
from earnest.objectives.metrics import Metric
from earnest.objectives.policy_gradient import Clipped
from earnest.objectives.registry import register
from earnest.objectives.view import View
from earnest.settings import setting


@dataclass(frozen=True, kw_only=True)
class SequenceRatio(Clipped):
    """The clipped surrogate on the geometric-mean ratio of each sequence."""

    over: ClassVar[str] = "sequences"
    # With one advantage per sequence both forms have the same gradient, by construction.
    twins: ClassVar[frozenset[tuple[str, str]]] = frozenset({("sequence", "token")})

    clip: float = setting(3e-4, "ε: the sequence ratio is clipped below at 1-ε", above=0.0, at_most=1.0)
    clip_high: float | None = setting(
        4e-4, "ε_high: the sequence ratio is clipped above at 1+ε_high; none: ε", above=0.0
    )
    level: str = setting(
        "sequence",
        "one advantage and one ratio per sequence, or the token form for advantages that differ within a sequence",
        choices=("sequence", "token"),
    )

    def per_token(self, view: View) -> tuple[Float[Tensor, " n"], dict[str, Metric]]:
        gap = self.log_ratio(view)
        log_ratio = self.sequence_mean(view, gap)[view.segment]
        if self.level == "token":
            log_ratio = log_ratio.detach() + (gap - gap.detach())
        else:
            self._demand_one_advantage(view)
        return self.clipped(view, log_ratio)

    def sequence_mean(self, view: View, gap: Float[Tensor, " n"]) -> Float[Tensor, " S"]:
        """log s_i: the mean of lp - q over each sequence."""
        return view.row_mean(gap)

    def _demand_one_advantage(self, view: View) -> None:
        mean = view.row_mean(view.advantages)[view.segment]
        apart = (view.advantages - mean).abs() > 1e-4 * (1 + mean.abs())
        if bool(apart.any()):
            row = int(view.row[apart][0])
            raise SignalError(
                f"{self.label}: level='sequence' takes one advantage per sequence, row {row} has several; use "
                "level='token'."
            )


@register
@dataclass(frozen=True, kw_only=True)
class GSPO(SequenceRatio):
    """Group sequence policy optimisation: the ratio and the clip belong to the sequence."""

    kind: ClassVar[str] = "gspo"
    paper: ClassVar[str] = "GSPO, arXiv 2507.18071"
    equation: ClassVar[str] = "1/S Σ_i -min(s_i A_i, clip(s_i, 1-ε, 1+ε_high)A_i),  s_i = exp(mean_t(lp - q))"
    per: ClassVar[str] = "sequence"


@register
@dataclass(frozen=True, kw_only=True)
class LUSPO(SequenceRatio):
    """GSPO with each sequence's loss times its length, so that tokens of long answers do not count less."""

    kind: ClassVar[str] = "luspo"
    paper: ClassVar[str] = "LUSPO (length-unbiased sequence policy optimisation), arXiv 2602.05261"
    equation: ClassVar[str] = "1/S Σ_i |y_i| · -min(s_i A_i, clip(s_i, 1-ε, 1+ε_high)A_i)"
    per: ClassVar[str] = "sum"
