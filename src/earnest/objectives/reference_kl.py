"""A penalty on the sampled KL to the reference. Reports name the KL whose gradient it has.

    d = lp - lp₀,   k2 = ½d²,   k3 = e^{-d} + d - 1

Both values estimate KL(π‖π₀) on samples of π. As losses they differ (arXiv 2510.01555): on-policy E∇k2 = ∇KL(π‖π₀),
but E∇k3 = ∇KL(π₀‖π), the *forward* KL. ``straight_through`` has k3's value and k2's gradient. k1 = d cannot be a
loss: its gradient does not depend on the reference and has mean 0. Off-policy each needs the ratio: ``detached``
multiplies by sg[ρ];
``attached`` by ρ itself, which turns k3's gradient into the reverse KL's (E_μ∇(ρ·k3) = E_π[d·∇lp]).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.errors import ObjectiveError
from earnest.objectives.base import LogProbTerm, Signal, Value
from earnest.objectives.metrics import Max, Mean, Metric
from earnest.objectives.registry import register
from earnest.objectives.view import View
from earnest.settings import setting
from earnest.signals.batch import Role

REVERSE, FORWARD = "gradient of KL(π‖π₀)", "gradient of KL(π₀‖π)"


@register
@dataclass(frozen=True, kw_only=True)
class ReferenceKL(LogProbTerm):
    """Keeps the policy near the reference, by an estimate of the KL on the sampled tokens."""

    kind: ClassVar[str] = "reference_kl"
    paper: ClassVar[str] = "k1, k2, k3: Schulman 2020, joschu.net/blog/kl-approx.html; as losses: arXiv 2510.01555"
    equation: ClassVar[str] = "mean of ½d² (k2) or e^{-d}+d-1 (k3),  d = lp - lp₀"
    roles: ClassVar[tuple[Role, ...]] = ("rollout",)
    laws: ClassVar[frozenset[str]] = frozenset({"zero_at_source", "inactive_at_source"})

    twins: ClassVar[frozenset[tuple[str, str]]] = frozenset({("k2", "straight_through")})

    estimator: str = setting(
        "k2",
        "k2 has the gradient of the reverse KL, k3 of the forward, straight_through k3's value and k2's gradient",
        choices=("k2", "k3", "straight_through"),
    )
    importance: str = setting(
        "none",
        "off-policy correction: none, times sg[ρ], or times ρ with its gradient (k3 only)",
        choices=("none", "detached", "attached"),
    )
    per: str = setting(
        "sequence", "what is averaged: the sequences' token means, or all tokens", choices=("sequence", "token")
    )

    def __post_init__(self) -> None:
        if self.estimator == "k1":
            raise ObjectiveError(
                f"{self.label}: k1 = lp - lp₀ cannot be a loss: its gradient does not depend on the reference. "
                "Use 'k2' (or put k1 into the reward)."
            )
        super().__post_init__()

    def validate(self) -> None:
        if self.importance == "attached" and self.estimator != "k3":
            raise ObjectiveError(
                f"{self.label}: importance='attached' gives a KL's gradient with k3 only, not with {self.estimator}; "
                "use 'detached'."
            )

    def signals(self) -> frozenset[Signal]:
        return frozenset({"reference.logprobs"} if self.importance == "none" else {"reference.logprobs", "behaviour"})

    @property
    def gradient(self) -> str:
        """The KL whose gradient this is in expectation: on-policy, or over μ with the ratio."""
        name = FORWARD if self.estimator == "k3" and self.importance != "attached" else REVERSE
        return name if self.importance != "none" else f"{name} on-policy"

    def evaluate(self, view: View) -> Value:
        lp = view.logprobs
        gap = lp - view.reference
        values = self.estimate(gap)
        if self.importance != "none":
            ratio = (lp - view.behaviour).exp()
            values = values * (ratio if self.importance == "attached" else ratio.detach())
        loss = view.mean(values, self.per)
        with torch.no_grad():
            metrics: dict[str, Metric] = {
                "k1": Mean.of(gap),
                "k2": Mean.of(k2(gap)),
                "k3": Mean.of(k3(gap)),
                "gap_max": Max.of(gap.abs()),
            }
        return Value(loss, f"{self.estimator}, {self.gradient}", metrics)

    def estimate(self, gap: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        if self.estimator == "k2":
            return k2(gap)
        if self.estimator == "k3":
            return k3(gap)
        return k2(gap) + (k3(gap) - k2(gap)).detach()


def k2(gap: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    return gap.square() / 2


def k3(gap: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    return torch.expm1(-gap) + gap
