"""Heal: train a new adapter on the steered samples, within a trust region.

    min over the new adapter   SFT on the survivors + λ(1+round)^p · relu(D − τ) + γ · mean relu(σ_max(ΔW) − cap)

Earlier rounds are frozen adapters below the new one, and the base does not change. D is measured against the base
(every gate at 0) or the previous round (the new gate at 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import torch

from earnest.adapters import Adapter, attach
from earnest.adapters.variant import Variant
from earnest.engines import LocalEngine
from earnest.engines.optimizers import AdamW, Optimizer
from earnest.engines.reports import StepReport
from earnest.errors import EarnestError
from earnest.models.policy import Policy
from earnest.objectives import SFT, KLBarrier, Objective, SpectralCap
from earnest.objectives.trust import AGGREGATES
from earnest.settings import Checked, setting
from earnest.signals import Batch, with_reference
from earnest.steering.errors import SteeringError
from earnest.steering.filter import SteeredSample

NEVER = 1e9
"""A τ that no divergence reaches, so that the barrier only measures."""


@dataclass(frozen=True, kw_only=True)
class Healing(Checked):
    """The training settings of a round."""

    error: ClassVar[type[EarnestError]] = SteeringError

    steps: int = setting(24, "updates in a round", at_least=1)
    rows: int = setting(24, "samples in an update", at_least=1)
    over: str = setting("rmse", "how the barrier aggregates the tokens' divergences", choices=AGGREGATES)
    reference: str = setting(
        "previous",
        "the policy from which the barrier measures: the base or the previous round",
        choices=("base", "previous"),
    )
    tau: float = setting(0.3, "τ: the divergence that costs nothing, in nats", at_least=0.0)
    weight: float = setting(1.0, "λ: the slope of the barrier beyond τ", above=0.0)
    growth: float = setting(0.0, "p: in round k the slope is λ·(1+k)^p")
    cap: float | None = setting(None, "the largest σ_max(ΔW) that costs nothing; none: no spectral cap", at_least=0.0)
    cap_weight: float = setting(1.0, "the weight of the spectral cap's term")
    pressure_every: int = setting(
        8, "measure the norms of the terms' gradients every N updates (one more backward pass per term)", at_least=1
    )

    def objective(self) -> Objective:
        """SFT, the barrier, and the spectral cap if it is set."""
        barrier = KLBarrier(
            over=self.over, reference=self.reference, tau=self.tau, strength=self.weight, growth=self.growth
        )
        found = SFT() + barrier
        return found if self.cap is None else found + self.cap_weight * SpectralCap(cap=self.cap)


@dataclass(frozen=True)
class Healed:
    """A trained round: its frozen adapter and the reports of its steps. ``pressure`` is ‖∇barrier‖/‖∇SFT‖ over the
    measured steps; ``firing`` the share of steps in which the barrier was active."""

    adapter: Adapter
    reports: tuple[StepReport, ...]

    def series(self, term: str, metric: str) -> list[float]:
        return [report.terms[term].metrics[metric] for report in self.reports]

    def summary(self) -> dict[str, float]:
        pressures = [
            (r.terms["kl_barrier"].gradient_norm or 0.0) / norm
            for r in self.reports
            if (norm := r.terms["sft"].gradient_norm)
        ]
        nll = self.series("sft", "nll")
        caps = [r.terms["spectral_cap"].metrics["sigma_max"] for r in self.reports if "spectral_cap" in r.terms]
        return {
            "nll_first": nll[0],
            "nll_last": nll[-1],
            "firing": fmean(self.series("kl_barrier", "beyond")),
            "aggregate_last": self.series("kl_barrier", "aggregate")[-1],
            "divergence_last": self.series("kl_barrier", "divergence")[-1],
            "strength": self.series("kl_barrier", "strength")[-1],
            "pressure": fmean(pressures) if pressures else 0.0,
        } | ({"sigma_max": caps[-1]} if caps else {})


def demonstrations(policy: Policy, samples: Sequence[SteeredSample]) -> Batch:
    return Batch.from_rows(
        [s.prompt for s in samples], [s.tokens for s in samples], role="demonstration", pad=policy.pad_id
    ).to(policy.device)


@dataclass(frozen=True)
class PreparedRound:
    """A round before its first step: the engine, the objective, and all survivors with their reference."""

    engine: LocalEngine
    objective: Objective
    everything: Batch


def prepare_round(
    policy: Policy,
    samples: Sequence[SteeredSample],
    variant: Variant,
    optimizer: Optimizer | None = None,
    *,
    objective: Objective,
    targets: str | Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    round_number: int = 0,
    seed: int = 0,
    max_grad_norm: float | None = 1.0,
) -> PreparedRound:
    """Attach a new adapter on top of the existing ones and prepare its training on ``samples``."""
    adapter = attach(policy, variant, targets, layers, seed=seed)
    try:
        engine = LocalEngine(policy, adapter, optimizer or AdamW(lr=2e-3), max_grad_norm=max_grad_norm)
        engine.objective_state = _state(objective, round_number)
        # No reference changes while this adapter trains, so it is scored once.
        return PreparedRound(engine, objective, with_reference(engine, demonstrations(policy, samples), objective))
    except BaseException:
        adapter.detach()
        raise


def heal(
    policy: Policy,
    samples: Sequence[SteeredSample],
    variant: Variant,
    optimizer: Optimizer | None = None,
    *,
    how: Healing | None = None,
    objective: Objective | None = None,
    seed: int = 0,
    **settings: Any,
) -> Healed:
    """Attach a new adapter on top of the existing ones, train it on ``samples`` and freeze it.

    objective: replaces the one of ``how`` (it must read demonstrations). settings: those of ``prepare_round``.
    """
    how = how or Healing()
    objective = objective or how.objective()
    prepared = prepare_round(policy, samples, variant, optimizer, objective=objective, seed=seed, **settings)
    try:
        generator = torch.Generator().manual_seed(seed)
        reports = []
        for step in range(how.steps):
            chosen = torch.randperm(len(prepared.everything), generator=generator)[: how.rows]
            measure = step % how.pressure_every == how.pressure_every - 1
            rows = prepared.everything.rows(chosen.to(policy.device))
            reports.append(prepared.engine.step(rows, prepared.objective, shares=measure))
    except BaseException:
        prepared.engine.adapter.detach()
        raise
    prepared.engine.adapter.freeze()
    return Healed(prepared.engine.adapter, tuple(reports))


def _state(objective: Objective, round_number: int) -> dict[str, dict[str, Any]]:
    state: Mapping[str, Mapping[str, Any]] = objective.initial_state()
    for _ in range(round_number):
        state = objective.next_round(state)
    return {label: dict(value) for label, value in state.items()}
