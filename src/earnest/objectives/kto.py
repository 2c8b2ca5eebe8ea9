"""KTO, unpaired preferences: each answer alone is wanted (a row of role chosen) or unwanted (rejected).

    r  = Σ_t (lp - lp₀),   z₀ = max(0, mean over rows of r of this answer to another row's prompt),  no gradient
    wanted:    λ_D·(1 - σ(β(r - z₀)))
    unwanted:  λ_U·(1 - σ(β(z₀ - r)))          L = mean over rows

z₀ estimates KL(π‖π₀); it is the batch's signal ``kl_baseline``. With ``baseline="zero"`` z₀ is 0: APO-zero, unpaired.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from earnest.objectives.base import LogProbTerm, Signal, Value
from earnest.objectives.metrics import Max, Mean, Metric
from earnest.objectives.registry import register
from earnest.objectives.view import View
from earnest.settings import setting
from earnest.signals.batch import Role


@register
@dataclass(frozen=True, kw_only=True)
class KTO(LogProbTerm):
    """Kahneman-Tversky optimisation: raises wanted answers and lowers unwanted ones against a KL baseline.

    The baseline is of the whole batch, so any cut into micro-batches gives the same gradient. Pairs are read row by
    row; ``Batch.pair`` has no meaning here.
    """

    kind: ClassVar[str] = "kto"
    paper: ClassVar[str] = "KTO, arXiv 2402.01306; baseline zero: APO-zero, 2408.06266"
    equation: ClassVar[str] = "mean λ·(1 - σ(±β(r - z₀))),  r = Σ_t (lp - lp₀)"
    roles: ClassVar[tuple[Role, ...]] = ("chosen", "rejected")

    beta: float = setting(0.1, "β: strength of the constraint to the reference (larger: closer)", above=0.0)
    desirable_weight: float = setting(1.0, "λ_D: weight of wanted answers", at_least=0.0)
    undesirable_weight: float = setting(1.0, "λ_U: weight of unwanted answers", at_least=0.0)
    baseline: str = setting(
        "batch", "z₀: the batch's estimate of the KL to the reference, or zero", choices=("batch", "zero")
    )

    def signals(self) -> frozenset[Signal]:
        own: frozenset[Signal] = frozenset({"reference.logprobs"})
        return own | {"kl_baseline"} if self.baseline == "batch" else own

    def evaluate(self, view: View) -> Value:
        r = view.row_sum(view.logprobs - view.reference)
        z = torch.zeros_like(r)
        if self.baseline == "batch":
            assert view.batch.kl_baseline is not None, "check() requires it"
            z = view.batch.kl_baseline[view.rows].to(r.dtype)
        wanted = view.batch.has_role(("chosen",))[view.rows]
        gain = self.beta * torch.where(wanted, r - z, z - r)
        weight = torch.where(wanted, self.desirable_weight, self.undesirable_weight)
        losses = weight * torch.sigmoid(-gain)  # 1 - σ(x), without cancellation
        metrics: dict[str, Metric] = {
            "accuracy": Mean.of(gain > 0),
            "reward_chosen": Mean.of(self.beta * r[wanted]),
            "reward_rejected": Mean.of(self.beta * r[~wanted]),
            "kl_baseline": Max.of(z),
        }
        return Value(losses.sum() / view.counts.sequences, f"kto, baseline {self.baseline}", metrics)
