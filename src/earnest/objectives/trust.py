"""Barriers and bonuses on the policy as a whole.

    KLBarrier      λ·(1+round)^p · relu(D - τ),   D = mean, rmse, p95 or max over all targets of KL(π‖π₀) or KL(π₀‖π)
    SpectralCap    mean over adapted modules of relu(σ_max(ΔW) - cap)
    EntropyBonus   -mean H(π)

A mean hides a few looping tokens among many good ones; the rmse does not. Each aggregate needs another τ, and
``calibrate_tau`` computes it from a healthy batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.errors import ObjectiveError, SignalError
from earnest.objectives.base import Signal, Term, Value
from earnest.objectives.metrics import Max, Mean, Metric, Sum
from earnest.objectives.needs import Divergence, Entropy, Need, SpectralNorm
from earnest.objectives.registry import register
from earnest.objectives.view import Scalars, View
from earnest.settings import setting
from earnest.signals.batch import Batch, Role
from earnest.signals.scorer import Who

AGGREGATES = ("mean", "rmse", "p95", "max")


def aggregate(values: Float[Tensor, " n"], over: str) -> Float[Tensor, ""]:
    """One number from the divergences per position, in float32 or wider; at all zeros its gradient is 0, not NaN."""
    if values.numel() == 0:
        raise SignalError(f"there is no position to take the {over} of; check the mask.")
    values = values if values.dtype == torch.float64 else values.float()
    if over == "mean":
        return values.mean()
    if over == "rmse":
        return Root.apply(values.square().mean())
    if over == "max":
        return values.max()
    if over == "p95":  # linear interpolation; torch.quantile takes neither bf16 nor more than 2**24 values
        ordered = values.sort().values
        place = 0.95 * (values.numel() - 1)
        low = int(place)
        return torch.lerp(ordered[low], ordered[min(low + 1, values.numel() - 1)], place - low)
    raise ObjectiveError(f"over must be one of {', '.join(AGGREGATES)}, got {over!r}.")


class Root(torch.autograd.Function):
    """√x with slope 0 at x = 0, so a policy at its reference has a zero gradient.

    It needs no epsilon, which would round to 0 in 16 bits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        root = x.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (root,) = ctx.saved_tensors
        return torch.where(root > 0, slope / (2 * root).clamp(min=torch.finfo(root.dtype).tiny), 0.0)


def calibrate_tau(divergence: Float[Tensor, " n"], over: str = "rmse", margin: float = 2.0) -> float:
    """τ = margin × the aggregate of a batch that is known to be healthy (but not the reference itself)."""
    if not margin > 0:
        raise ObjectiveError(f"margin must be above 0, got {margin}.")
    found = float(aggregate(divergence.detach(), over))
    if not found > 0:
        raise ObjectiveError(
            f"the batch's divergence is {found:g}: the policy equals its reference, so tau cannot be "
            "calibrated on it; take a batch after some healthy training, or set tau by hand."
        )
    return margin * found


@register
@dataclass(frozen=True, kw_only=True)
class KLBarrier(Term):
    """No cost up to a divergence τ from the reference, a linear cost above it; all roles, over the whole optimizer
    batch."""

    kind: ClassVar[str] = "kl_barrier"
    paper: ClassVar[str] = "a hinge on a trust region (TRPO's constraint, arXiv 1502.05477)"
    equation: ClassVar[str] = "λ·(1+round)^p·relu(D - τ),  D = agg_t KL(π‖π₀)"
    laws: ClassVar[frozenset[str]] = frozenset({"zero_at_source", "inactive_at_source"})

    beyond_step: ClassVar[frozenset[str]] = frozenset({"growth", "reference"})

    tau: float = setting(
        1.0, "τ: the divergence without cost, in nats; each aggregate needs another value", at_least=0.0
    )
    over: str = setting("rmse", "how positions are aggregated", choices=AGGREGATES)
    direction: str = setting("reverse", "KL(π‖π₀) or KL(π₀‖π)", choices=("reverse", "forward"))
    reference: str = setting(
        "base", "the reference policy: the base without adapters, or the previous round", choices=("base", "previous")
    )
    strength: float = setting(1.0, "λ: slope of the cost above τ", above=0.0)
    growth: float = setting(0.0, "p: λ is multiplied by (1+round)^p; negative decays, positive grows")

    @property
    def additive(self) -> bool:
        return False

    @property
    def need(self) -> Divergence:
        return Divergence("reference", alpha=1.0 if self.direction == "reverse" else 0.0)

    @property
    def reference_kind(self) -> Who:
        return "previous" if self.reference == "previous" else "base"

    def signals(self) -> frozenset[Signal]:
        return frozenset({"reference.distribution"})

    def needs(self, batch: Batch, state: Mapping[str, Any]) -> tuple[Need, ...]:
        return (self.need,)

    def check(self, batch: Batch) -> str | None:
        idle = super().check(batch)
        assert batch.reference is not None, "check() demands it"
        if batch.reference.kind != self.reference:
            raise SignalError(
                f"{self.label}: uses the {self.reference!r} policy as its reference, the batch's reference is "
                f"{batch.reference.kind!r}; "
                f"supply that one, or set reference={batch.reference.kind!r}."
            )
        return idle

    def only_exact(self) -> str | None:
        if self.over == "mean":
            return None
        return (
            f"the {self.over} over positions is not linear in the divergence, so estimates per sampled token do not "
            "give its gradient; set over='mean'"
        )

    def of_rounds(self) -> tuple[str, ...]:
        return (*(["growth"] if self.growth else []), *(["reference"] if self.reference == "previous" else []))

    def initial_state(self) -> dict[str, Any]:
        return {"round": 0}

    def next_round(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {"round": int(state["round"]) + 1}

    def evaluate(self, view: View) -> Value:
        divergence = view.scalar(self.need)
        drift = aggregate(divergence, self.over)
        strength = self.strength * (1 + int(view.state.get("round", 0))) ** self.growth
        loss = strength * torch.relu(drift - self.tau)
        metrics: dict[str, Metric] = {
            "divergence": Mean.of(divergence),
            "divergence_max": Max.of(divergence),
            "aggregate": Max.of(drift),
            "strength": Max(strength),
            "beyond": Max(float(drift.detach() > self.tau)),
            "positions": Sum(float(len(view))),
        }
        return Value(loss, f"{self.over} of {view.ran(self.need)} against {self.reference}, tau {self.tau:g}", metrics)

    def activated(self, metrics: Mapping[str, float]) -> Self:
        return self if metrics["aggregate"] > self.tau else replace(self, tau=0.5 * metrics["aggregate"])

    def calibrated(self, batch: Batch, scalars: Scalars, margin: float = 2.0) -> Self:
        """This barrier with τ set from a healthy batch: ``engine.scalars(batch, barrier.needs(batch, {}))``."""
        view = View.of(batch, scalars, self.tokens(batch), batch.counts(), {}, self.label)
        return replace(self, tau=calibrate_tau(view.scalar(self.need), self.over, margin))


@register
@dataclass(frozen=True, kw_only=True)
class SpectralCap(Term):
    """A penalty on the largest singular value of every adapted module's ΔW. It reads the adapter, not the tokens."""

    kind: ClassVar[str] = "spectral_cap"
    paper: ClassVar[str] = "spectral norm regularisation, arXiv 1705.10941"
    equation: ClassVar[str] = "mean_m relu(σ_max(ΔW_m) - cap)"
    laws: ClassVar[frozenset[str]] = frozenset({"inactive_at_source"})

    cap: float = setting(0.0, "the largest singular value without cost", at_least=0.0)

    @property
    def additive(self) -> bool:
        return False

    def needs(self, batch: Batch, state: Mapping[str, Any]) -> tuple[Need, ...]:
        return (SpectralNorm(),)

    def evaluate(self, view: View) -> Value:
        need = SpectralNorm()
        norms = view.per_module(need)
        metrics: dict[str, Metric] = {
            "sigma": Mean.of(norms),
            "sigma_max": Max.of(norms),
            "capped": Mean.of(norms > self.cap),
        }
        return Value(torch.relu(norms - self.cap).mean(), f"mean excess over {self.cap:g}, {view.ran(need)}", metrics)

    def activated(self, metrics: Mapping[str, float]) -> Self:
        return self if metrics["sigma_max"] > self.cap else replace(self, cap=0.5 * metrics["sigma"])


@register
@dataclass(frozen=True, kw_only=True)
class EntropyBonus(Term):
    """Rewards the policy's entropy on its rollouts, at the sampling temperature."""

    kind: ClassVar[str] = "entropy"
    paper: ClassVar[str] = "Williams & Peng 1991; A3C, arXiv 1602.01783"
    equation: ClassVar[str] = "-1/(Σ_i |y_i|) Σ_i Σ_t H(π)"
    roles: ClassVar[tuple[Role, ...]] = ("rollout",)

    def needs(self, batch: Batch, state: Mapping[str, Any]) -> tuple[Need, ...]:
        return (Entropy(batch.temperature),)

    def evaluate(self, view: View) -> Value:
        entropy = view.scalar(Entropy(view.batch.temperature))
        return Value(-view.token_mean(entropy), "entropy bonus", {"entropy": Mean.of(entropy)})
