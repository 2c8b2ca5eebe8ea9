"""Policy gradients without a hard clip.

    cispo   ℓ = -sg[min(ρ, c)]·A·lp                 c is an absolute bound on the ratio, such as 5
    sapo    ℓ = -(4/τ)·σ(τ(ρ - 1))·A                τ⁺ where A > 0, τ⁻ elsewhere

CISPO bounds the weight of a token, SAPO reduces it smoothly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.objectives.metrics import Mean, Metric
from earnest.objectives.policy_gradient import LARGEST_LOG_RATIO, RatioGradient
from earnest.objectives.registry import register
from earnest.objectives.view import View
from earnest.settings import setting


@register
@dataclass(frozen=True, kw_only=True)
class CISPO(RatioGradient):
    """REINFORCE on every token, weighted by the bounded ratio; every token of the whole batch has the same weight."""

    kind: ClassVar[str] = "cispo"
    paper: ClassVar[str] = "MiniMax-M1, arXiv 2506.13585; absolute bound: ScaleRL, arXiv 2510.13786"
    equation: ClassVar[str] = "1/(Σ_i |y_i|) Σ_i Σ_t -sg[min(ρ, c)]·A·lp"
    laws: ClassVar[frozenset[str]] = frozenset({"reinforce_on_policy", "stop_gradient"})

    max_ratio: float = setting(
        5.0,
        "c: absolute upper bound on the ratio; at least 1, so that on-policy gradients are those of REINFORCE",
        at_least=1.0,
    )

    def per_token(self, view: View) -> tuple[Float[Tensor, " n"], dict[str, Metric]]:
        ratio = self.log_ratio(view).detach().exp()
        bounded = self.bound(view, ratio)
        metrics: dict[str, Metric] = {"clip_high": Mean.of(ratio > bounded)}
        return -bounded * view.advantages * view.logprobs, metrics

    def bound(self, view: View, ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """min(ρ, c)."""
        return ratio.clamp(max=self.max_ratio)


@register
@dataclass(frozen=True, kw_only=True)
class SAPO(RatioGradient):
    """Soft adaptive policy optimisation: a sigmoid gate in place of the clip."""

    kind: ClassVar[str] = "sapo"
    paper: ClassVar[str] = "SAPO, arXiv 2511.20347"
    equation: ClassVar[str] = "1/S Σ_i 1/|y_i| Σ_t -(4/τ)·σ(τ(ρ-1))·A"
    per: ClassVar[str] = "sequence"

    tau_positive: float = setting(1.0, "τ⁺: how fast the gate closes where the advantage is positive", above=0.0)
    tau_negative: float = setting(1.05, "τ⁻: how fast it closes elsewhere", above=0.0)

    def per_token(self, view: View) -> tuple[Float[Tensor, " n"], dict[str, Metric]]:
        ratio = self.log_ratio(view).clamp(max=LARGEST_LOG_RATIO).exp()  # the gate is closed at much smaller ratios
        tau = torch.where(view.advantages > 0, self.tau_positive, self.tau_negative)
        gate = torch.sigmoid(tau * (ratio - 1))
        metrics: dict[str, Metric] = {"gate": Mean.of(4 * gate * (1 - gate))}
        return -(4 / tau) * gate * view.advantages, metrics
