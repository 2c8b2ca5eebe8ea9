"""Distillation from a teacher in the batch, and self-distillation from the policy with feedback in its prompt.

    Distill   mean over covered tokens of GJS_α(S, T)
    SDPO      mean over covered tokens of sg[min(ρ, c)]·w_g·GJS_α(S, T)

SDPO's teacher is the policy itself with a feedback-conditioned prompt: feedback, or a correct completion of the same
group (``signals.teachers``). Rows without a teacher are left out and counted. w_g = √(p̂(1-p̂)), with the success rate p̂
of the row's group, is SC-SDPO's weight;
``route="failed"`` is one half of SRPO; the other half is ``GRPO(route="correct")``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from earnest.objectives.base import Signal, Value
from earnest.objectives.entropy_aware import EntropyAware
from earnest.objectives.metrics import Max, Mean, Metric
from earnest.objectives.needs import Divergence, LogProb, Need
from earnest.objectives.policy_gradient import ROUTES, routed
from earnest.objectives.registry import register
from earnest.objectives.taid import TAID
from earnest.objectives.teacher_term import PerToken, TeacherTerm, covered, plain
from earnest.objectives.view import View
from earnest.settings import setting
from earnest.signals.batch import Batch, Role


@register
@dataclass(frozen=True, kw_only=True)
class Distill(TeacherTerm):
    """The divergence to the batch's teacher, token by token."""

    kind: ClassVar[str] = "distill"
    paper: ClassVar[str] = "GKD, arXiv 2306.13649"
    equation: ClassVar[str] = "mean_t GJS_α(S, T),  α = 0: KL(T‖S), α = 1: KL(S‖T)"

    alpha: float = setting(
        0.5, "α: 0 is the forward KL, 1 the reverse, between them the Jensen–Shannon family", at_least=0.0, at_most=1.0
    )
    normalised: bool = setting(False, "divide by α(1-α), so that α does not change the scale of the gradient")
    wrap: TAID | EntropyAware | None = setting(None, "a method that changes the divergence: taid or entropy_aware")

    def validate(self) -> None:
        super().validate()
        if self.wrap is not None:
            self.wrap.demand_bare(self.label)

    def need(self, batch: Batch) -> Divergence:
        return self.divergence(batch, self.alpha, self.normalised)

    def needs(self, batch: Batch, state: Mapping[str, Any]) -> tuple[Need, ...]:
        need = self.need(batch)
        return (need,) if self.wrap is None else tuple(dict.fromkeys(self.wrap.wrap_needs(need, state)))

    def initial_state(self) -> dict[str, Any]:
        return {} if self.wrap is None else self.wrap.initial_state()

    def advance(self, state: Mapping[str, Any], value: float, metrics: Mapping[str, float]) -> dict[str, Any]:
        return dict(state) if self.wrap is None else self.wrap.advance(state, value, metrics)

    def per_token(self, view: View) -> PerToken:
        need = self.need(view.batch)
        found = plain(need, view) if self.wrap is None else self.wrap.wrap_values(need, view)
        metrics: dict[str, Metric] = {"divergence": Mean.of(found.values), "divergence_max": Max.of(found.values)}
        return replace(found, metrics=found.metrics | metrics)

    def evaluate(self, view: View) -> Value:
        found = self.per_token(view)
        return Value(view.token_mean(found.values), found.ran, found.metrics)


@register
@dataclass(frozen=True, kw_only=True)
class SDPO(Distill):
    """Self-distillation policy optimisation: the policy with a feedback-conditioned prompt is the teacher."""

    kind: ClassVar[str] = "sdpo"
    paper: ClassVar[str] = "SDPO, arXiv 2601.20802"
    equation: ClassVar[str] = "mean_t sg[min(ρ, c)]·w_g·GJS_α(S, T_feedback)"
    roles: ClassVar[tuple[Role, ...]] = ("rollout",)
    laws: ClassVar[frozenset[str]] = frozenset({"zero_at_source", "stop_gradient"})

    support: str = setting(
        "student",
        "which tokens are compared: all, or the top-K of the student or the teacher",
        choices=("full", "student", "teacher"),
    )
    importance_clip: float | None = setting(
        2.0, "c: bound on the ratio to the policy that sampled; none: no ratio and no behaviour log-probs", above=0.0
    )
    weighting: str = setting(
        "none",
        "weight of a prompt: none, or SC-SDPO's √(p̂(1-p̂)) of its success rate",
        choices=("none", "success_variance"),
    )
    route: str = setting("all", "which rollouts it trains on: SRPO sends the failed ones here", choices=ROUTES)

    @property
    def additive(self) -> bool:
        return self.weighting == "none"  # a group may extend over several micro-batches

    def signals(self) -> frozenset[Signal]:
        more: set[Signal] = set()
        if self.importance_clip is not None:
            more.add("behaviour")
        if self.weighting != "none" or self.route != "all":
            more.add("correct")
        return super().signals() | more

    def needs(self, batch: Batch, state: Mapping[str, Any]) -> tuple[Need, ...]:
        ratio: tuple[Need, ...] = () if self.importance_clip is None else (LogProb(batch.temperature),)
        return (*super().needs(batch, state), *ratio)

    def selects(self, batch: Batch) -> Bool[Tensor, " N"]:
        taught, taken = covered(batch), routed(batch, self.route)
        return taught if taken is None else taught & taken

    def empty(self) -> str | None:
        return super().empty() if self.route == "all" else f"no {self.route} rollout has a teacher"

    def evaluate(self, view: View) -> Value:
        found = self.per_token(view)
        values, ran, metrics = found.values, found.ran, found.metrics
        if self.importance_clip is not None:
            gap = view.logprobs.detach() - view.behaviour
            ratio = gap.exp()
            values = values * ratio.clamp(max=self.importance_clip)
            ran += f" × min(ρ, {self.importance_clip:g})"
            metrics |= {
                "ratio": Mean.of(ratio),
                "ratio_max": Max.of(ratio),
                "clip_high": Mean.of(ratio > self.importance_clip),
            }
        if self.weighting == "success_variance":
            weight, unsure = success_variance(view.batch)
            values = values * weight[view.row]
            ran += " × √(p̂(1-p̂))"
            metrics |= {"prompts_with_weight": unsure}
        return Value(view.token_mean(values), ran, metrics)


def success_variance(batch: Batch) -> tuple[Float[Tensor, " R"], Metric]:
    """√(p̂(1-p̂)) for every row, and the share of groups where it is not 0.

    p̂ is the share of correct rollouts in the row's group.
    """
    assert batch.correct is not None, "check() requires it"
    rollout = batch.has_role(("rollout",))
    _, place = torch.unique(batch.group, return_inverse=True)
    groups = int(place.max()) + 1
    count = torch.zeros(groups, device=batch.device).index_add(0, place, rollout.float())
    right = torch.zeros(groups, device=batch.device).index_add(0, place, (batch.correct & rollout).float())
    rate = right / count.clamp(min=1)
    weight = (rate * (1 - rate)).sqrt()
    return weight[place], Mean.of(weight[count > 0] > 0)
