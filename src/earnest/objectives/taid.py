"""TAID (arXiv 2501.16937): the target moves from near the student to the teacher.

    p_t = softmax((1-t)·sg[z_S] + t·z_T),   L = KL(p_t‖S)
    m ← βm + (1-β)(L_prev - L)/(L_prev + ε),   t ← min(t_end, max(linear schedule, t + α_t·σ(m)·(1-t)))

Alone it is L; as ``wrap=TAID(…)`` it replaces the teacher inside the wrapped divergence. t and m live in the
objective's state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from earnest.errors import ObjectiveError
from earnest.objectives.base import Value
from earnest.objectives.metrics import Max, Mean
from earnest.objectives.needs import Divergence, Need
from earnest.objectives.registry import register
from earnest.objectives.teacher_term import PerToken, TeacherTerm, plain
from earnest.objectives.view import View
from earnest.settings import setting
from earnest.signals.batch import Batch

EPSILON = 1e-15


@register
@dataclass(frozen=True, kw_only=True)
class TAID(TeacherTerm):
    """Temporally adaptive interpolated distillation."""

    kind: ClassVar[str] = "taid"
    paper: ClassVar[str] = "TAID, arXiv 2501.16937"
    equation: ClassVar[str] = "KL(p_t‖S),  p_t = softmax((1-t)·sg[z_S] + t·z_T)"
    laws: ClassVar[frozenset[str]] = frozenset({"zero_at_source", "stop_gradient"})

    beyond_step: ClassVar[frozenset[str]] = frozenset({"t_start", "t_end", "rate", "momentum"})

    t_start: float = setting(0.4, "t at the first step; 0 is the student itself", above=0.0, at_most=1.0)
    t_end: float = setting(1.0, "t at the end; 1 is the teacher itself", above=0.0, at_most=1.0)
    steps: int = setting(
        1000, "updates over which the schedule's floor rises linearly from t_start to t_end", at_least=1
    )
    rate: float = setting(5e-4, "α_t: how much one update may raise t above the schedule", at_least=0.0)
    momentum: float = setting(0.99, "β: momentum of the loss's relative change", at_least=0.0, below=1.0)

    def validate(self) -> None:
        super().validate()
        if self.t_end < self.t_start:
            raise ObjectiveError(f"{self.label}: t_end {self.t_end} is below t_start {self.t_start}; t only rises.")

    def initial_state(self) -> dict[str, Any]:
        return {"t": self.t_start, "momentum": 0.0, "previous": None, "step": 0}

    def advance(self, state: Mapping[str, Any], value: float, metrics: Mapping[str, float]) -> dict[str, Any]:
        loss, step = metrics["divergence"], int(state["step"]) + 1
        momentum, t = float(state["momentum"]), float(state["t"])
        if state["previous"] is not None:
            before = float(state["previous"])
            momentum = self.momentum * momentum + (1 - self.momentum) * (before - loss) / (before + EPSILON)
            t += self.rate * (1 - t) / (1 + math.exp(-momentum))
        floor = self.t_start + (self.t_end - self.t_start) * min(1.0, step / self.steps)
        return {"t": min(self.t_end, max(floor, t)), "momentum": momentum, "previous": loss, "step": step}

    def wrap_needs(self, divergence: Divergence, state: Mapping[str, Any]) -> tuple[Need, ...]:
        return (self._blended(divergence, state),)

    def wrap_values(self, divergence: Divergence, view: View) -> PerToken:
        need = self._blended(divergence, view.state)
        found = plain(need, view)
        return replace(found, ran=f"taid of {found.ran}", metrics=found.metrics | {"taid_t": Max(need.blend or 0.0)})

    def _blended(self, divergence: Divergence, state: Mapping[str, Any]) -> Divergence:
        return replace(divergence, blend=float(state.get("t", self.t_start)))

    def needs(self, batch: Batch, state: Mapping[str, Any]) -> tuple[Need, ...]:
        return self.wrap_needs(self.divergence(batch, alpha=0.0), state)

    def evaluate(self, view: View) -> Value:
        found = self.wrap_values(self.divergence(view.batch, alpha=0.0), view)
        metrics = found.metrics | {"divergence": Mean.of(found.values)}
        return Value(view.token_mean(found.values), found.ran, metrics)
