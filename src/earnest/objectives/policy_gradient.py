"""Policy gradients with a clipped ratio. They differ in their normaliser.

    ρ = exp(lp - q),   ℓ = -min(ρA, clip(ρ, 1-ε_low, 1+ε_high)·A),   dual clip: ℓ ≤ -δA where A < 0

q are the log-probs of the policy that sampled. They are required: with q = sg[lp] the gradient is that of REINFORCE,
which is a term of its own (``Reinforce``). Law: at q = lp the gradient is that of REINFORCE with the same normaliser,
because 1 lies inside the clip range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from earnest.errors import ObjectiveError, SignalError
from earnest.objectives.base import LogProbTerm, Signal, Value
from earnest.objectives.importance import TruncatedIS
from earnest.objectives.metrics import Max, Mean, Metric, Sum
from earnest.objectives.registry import register
from earnest.objectives.view import View
from earnest.settings import setting
from earnest.signals.advantages import Estimator
from earnest.signals.batch import Batch, Role

ROUTES = ("all", "correct", "failed")
LARGEST_LOG_RATIO = 60.0
"""exp(60) is far above every clip; in float32 it is finite, also times an advantage of 1e12."""


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(LogProbTerm):
    """Base of policy gradients: rollouts, advantages, routing, and the log-prob at the sampling temperature."""

    roles: ClassVar[tuple[Role, ...]] = ("rollout",)

    route: str = setting("all", "which rollouts it trains on: SRPO sends the correct ones here", choices=ROUTES)

    def signals(self) -> frozenset[Signal]:
        routed: frozenset[Signal] = frozenset() if self.route == "all" else frozenset({"correct"})
        return routed | {"advantages"}

    def selects(self, batch: Batch) -> Bool[Tensor, " N"] | None:
        return routed(batch, self.route)

    def empty(self) -> str | None:
        return None if self.route == "all" else f"no rollout is {self.route}"

    def common_metrics(self, view: View) -> dict[str, Metric]:
        return {"advantage_zero": Mean.of(view.advantages == 0), "tokens": Sum(float(len(view)))}


def routed(batch: Batch, route: str) -> Bool[Tensor, " N"] | None:
    """The tokens of the rows that a route takes; None: all of them."""
    if route == "all" or batch.correct is None:  # check() requires ``correct`` for the other routes
        return None
    return (batch.correct if route == "correct" else ~batch.correct)[batch.row]


@dataclass(frozen=True, kw_only=True)
class RatioGradient(PolicyGradient):
    """A policy gradient with the ratio to the policy that sampled.

    With ``correction`` the ratio is to the trainer's own log-probs at sampling time (``proximal``), and the gap to
    the sampler's (``behaviour``) becomes a truncated weight.
    """

    laws: ClassVar[frozenset[str]] = frozenset({"reinforce_on_policy"})
    per: ClassVar[str] = "token"
    """The mean of the tokens' losses: see ``View.mean``."""

    correction: TruncatedIS | None = setting(None, "truncated importance sampling between sampler and trainer")

    def signals(self) -> frozenset[Signal]:
        more: frozenset[Signal] = frozenset({"behaviour"} if self.correction is None else {"behaviour", "proximal"})
        return super().signals() | more

    def log_ratio(self, view: View) -> Float[Tensor, " n"]:
        return view.logprobs - (view.behaviour if self.correction is None else view.proximal)

    def per_token(self, view: View) -> tuple[Float[Tensor, " n"], dict[str, Metric]]:
        """The loss per token before normalising, and the metrics of the clip."""
        raise NotImplementedError  # abstract: every registered term defines it

    def reduce(self, view: View, values: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        """The loss from the per-token values: the objective's normaliser."""
        return view.mean(values, self.per)

    def described(self) -> str:
        """The kind with the settings that affect the loss, for reports."""
        return self.kind

    def evaluate(self, view: View) -> Value:
        loss, metrics = self.per_token(view)
        ran = self.described()
        if self.correction is not None:
            weight, cut = self.correction.weights(view)
            loss = loss * weight
            metrics |= cut
            ran += f" × {self.correction.level} {self.correction.mode} importance"
        with torch.no_grad():
            gap = self.log_ratio(view)
            metrics |= {
                "behaviour_kl": Mean.of(gap.exp() - 1 - gap),
                "ratio": Mean.of(gap.exp()),
                "ratio_max": Max.of(gap.exp()),
            }
        return Value(self.reduce(view, loss), ran, metrics | self.common_metrics(view))


@dataclass(frozen=True, kw_only=True)
class Clipped(RatioGradient):
    """PPO's clipped surrogate per token."""

    clip: float = setting(
        0.2, "ε: the ratio is clipped below at 1-ε, and above at 1+ε unless clip_high is set", above=0.0, at_most=1.0
    )
    clip_high: float | None = setting(None, "ε_high: the ratio is clipped above at 1+ε_high; none: ε", above=0.0)
    dual_clip: float | None = setting(None, "δ: bound on the ratio where the advantage is negative", above=1.0)

    over: ClassVar[str] = "its own"
    """What the sum of the tokens' losses is divided by."""

    def described(self) -> str:
        bounds = {"clip": self.clip, "clip_high": self.clip_high, "dual_clip": self.dual_clip}
        given = ", ".join(f"{name}={value:g}" for name, value in bounds.items() if value is not None)
        return f"{self.kind}({given}, over={self.over})"

    @property
    def ceiling(self) -> float:
        return 1 + (self.clip if self.clip_high is None else self.clip_high)

    def validate(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= self.ceiling:
            raise ObjectiveError(
                f"{self.label}: dual_clip {self.dual_clip} must be above the upper clip {self.ceiling:g}; raise it."
            )

    def per_token(self, view: View) -> tuple[Float[Tensor, " n"], dict[str, Metric]]:
        return self.clipped(view, self.log_ratio(view))

    def bound(self, view: View, ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """clip(ρ)."""
        return ratio.clamp(1 - self.clip, self.ceiling)

    def clipped(self, view: View, log_ratio: Float[Tensor, " n"]) -> tuple[Float[Tensor, " n"], dict[str, Metric]]:
        """-min(ρA, clip(ρ)A) with ρ = exp(log_ratio), bounded by -δA where A < 0."""
        advantage = view.advantages
        # ρ must be finite where the clip sets the gradient to 0: 0 · ∞ would be NaN.
        removed = advantage >= 0 if self.dual_clip is None else torch.ones_like(advantage, dtype=torch.bool)
        ratio = torch.where(removed, log_ratio.clamp(max=LARGEST_LOG_RATIO), log_ratio).exp()
        bounded = self.bound(view, ratio)
        kept = torch.minimum(ratio * advantage, bounded * advantage)
        low = (ratio < bounded) & (advantage < 0)
        high = (ratio > bounded) & (advantage > 0)
        metrics: dict[str, Metric] = {"clip_low": Mean.of(low), "clip_high": Mean.of(high)}
        if self.dual_clip is not None:
            floor = self.dual_clip * advantage
            dual = (advantage < 0) & (kept < floor)
            kept = torch.where(dual, floor, kept)
            metrics["clip_dual"] = Mean.of(dual)
        return -kept, metrics


@register
@dataclass(frozen=True, kw_only=True)
class GRPO(Clipped):
    """Group-relative policy optimisation: the mean over sequences of the mean over their tokens."""

    kind: ClassVar[str] = "grpo"
    paper: ClassVar[str] = "DeepSeekMath, arXiv 2402.03300"
    equation: ClassVar[str] = "1/S Σ_i 1/|y_i| Σ_t -min(ρA, clip(ρ, 1-ε, 1+ε_high)A)"
    over: ClassVar[str] = "sequences"
    per: ClassVar[str] = "sequence"


@register
@dataclass(frozen=True, kw_only=True)
class DAPO(Clipped):
    """A higher upper clip, and the same weight for every token of the whole batch."""

    kind: ClassVar[str] = "dapo"
    paper: ClassVar[str] = "DAPO, arXiv 2503.14476"
    equation: ClassVar[str] = "1/(Σ_i |y_i|) Σ_i Σ_t -min(ρA, clip(ρ, 1-ε, 1+ε_high)A)"
    over: ClassVar[str] = "tokens"

    clip_high: float | None = setting(0.28, "ε_high: the ratio is clipped above at 1+ε_high", above=0.0)


@register
@dataclass(frozen=True, kw_only=True)
class DrGRPO(Clipped):
    """GRPO without its two biases: the divisor is constant instead of each length, and advantages have no std."""

    kind: ClassVar[str] = "dr_grpo"
    paper: ClassVar[str] = "Understanding R1-Zero-like training, arXiv 2503.20783"
    equation: ClassVar[str] = "1/(S·L_max) Σ_i Σ_t -min(ρA, clip(ρ, 1-ε, 1+ε_high)A)"
    over: ClassVar[str] = "max_length"
    estimators: ClassVar[tuple[Estimator, ...]] = ("none", "leave_one_out")

    max_length: int | None = setting(
        None, "L_max, the longest completion that sampling allows; none: the batch's", at_least=1
    )

    def check(self, batch: Batch) -> str | None:
        idle = super().check(batch)
        if self.max_length is None and batch.max_length is None:
            raise SignalError(
                f"{self.label}: divides by the longest allowed completion, which neither the batch nor the term sets; "
                "set Batch.max_length or DrGRPO(max_length=…)."
            )
        return idle

    def reduce(self, view: View, values: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        return view.total(values) / (view.counts.sequences * (self.max_length or view.counts.max_length))


@register
@dataclass(frozen=True, kw_only=True)
class BNPO(Clipped):
    """The mean over the tokens of each micro-batch, so by definition it depends on how the batch is split.

    Micro-batches are averaged by their share of the sequences. For a batch in one piece it is DAPO's mean with equal
    clips.
    """

    kind: ClassVar[str] = "bnpo"
    paper: ClassVar[str] = "TRL's loss_type 'bnpo' (batch-normalised), docs of GRPOTrainer"
    equation: ClassVar[str] = "Σ_parts (S_part/S) · 1/(Σ_part |y_i|) Σ_part Σ_t -min(ρA, clip(ρ)A)"
    over: ClassVar[str] = "micro-batch tokens"
    laws: ClassVar[frozenset[str]] = frozenset({"reinforce_on_policy", "batch_local"})

    def reduce(self, view: View, values: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        local = float(view.weight.sum(dtype=torch.float64))
        return view.total(values) / local * (len(view.rows) / view.counts.sequences)
