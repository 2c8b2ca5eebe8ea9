"""Policy gradients without a ratio.

    reinforce   ℓ = -A·lp, per token
    rloo        ℓ = -A·Σ_t lp, the completion as one action, A = r_i - mean_{j≠i} r_j

They are correct for one update per batch of rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from earnest.objectives.base import Value
from earnest.objectives.metrics import Mean
from earnest.objectives.policy_gradient import PolicyGradient
from earnest.objectives.registry import register
from earnest.objectives.view import View
from earnest.settings import setting
from earnest.signals.advantages import Estimator


@register
@dataclass(frozen=True, kw_only=True)
class Reinforce(PolicyGradient):
    """The score-function gradient with the advantages of the batch; it reads no behaviour log-probs."""

    kind: ClassVar[str] = "reinforce"
    paper: ClassVar[str] = "Williams 1992, doi 10.1007/BF00992696"
    equation: ClassVar[str] = "mean of -A·lp, over tokens or over sequences"
    laws: ClassVar[frozenset[str]] = frozenset({"reinforce_on_policy", "stop_gradient"})

    per: str = setting(
        "token",
        "what is averaged: all tokens, the sequences' token means, or the sequences' token sums",
        choices=("token", "sequence", "sum"),
    )

    def evaluate(self, view: View) -> Value:
        lp = view.logprobs
        loss = view.mean(-view.advantages * lp, self.per)
        return Value(loss, f"{self.kind} per {self.per}", {"nll": Mean.of(-lp)} | self.common_metrics(view))


@register
@dataclass(frozen=True, kw_only=True)
class RLOO(PolicyGradient):
    """REINFORCE on whole completions with a leave-one-out baseline."""

    kind: ClassVar[str] = "rloo"
    paper: ClassVar[str] = "Back to basics, arXiv 2402.14740"
    equation: ClassVar[str] = "1/S Σ_i -(r_i - mean_{j≠i} r_j)·Σ_t lp"
    laws: ClassVar[frozenset[str]] = frozenset({"reinforce_on_policy", "stop_gradient"})
    estimators: ClassVar[tuple[Estimator, ...]] = ("leave_one_out",)

    def evaluate(self, view: View) -> Value:
        lp = view.logprobs
        loss, ran = view.mean(-view.advantages * lp, "sum"), f"{self.kind}, advantages {view.batch.estimator}"
        return Value(loss, ran, {"nll": Mean.of(-lp)} | self.common_metrics(view))
