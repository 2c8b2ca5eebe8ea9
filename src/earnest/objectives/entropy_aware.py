"""Entropy-aware on-policy distillation (arXiv 2603.07079): reverse KL, plus forward KL where the teacher is uncertain.

    L_t = KL(S‖T) + 1[H(T) > h]·w·KL(T‖S)

Alone it is L; as ``wrap=EntropyAware(…)`` it replaces the wrapped divergence by KL(S‖T) + w·KL(T‖S) on the selected
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from earnest.objectives.base import Value
from earnest.objectives.metrics import Mean
from earnest.objectives.needs import Divergence, Need, SourceEntropy
from earnest.objectives.registry import register
from earnest.objectives.teacher_term import PerToken, TeacherTerm, plain
from earnest.objectives.view import View
from earnest.settings import setting
from earnest.signals.batch import Batch


@register
@dataclass(frozen=True, kw_only=True)
class EntropyAware(TeacherTerm):
    """Reverse KL to the teacher, plus the forward KL on the tokens where the teacher's entropy is high."""

    kind: ClassVar[str] = "entropy_aware"
    paper: ClassVar[str] = "Entropy-aware on-policy distillation, arXiv 2603.07079"
    equation: ClassVar[str] = "KL(S‖T) + 1[H(T) > h]·w·KL(T‖S)"

    threshold: float = setting(0.8, "h: the teacher's entropy above which a token is selected, in nats", at_least=0.0)
    forward_weight: float = setting(1.0, "w: weight of the forward KL on the selected tokens", above=0.0)

    def wrap_needs(self, divergence: Divergence, state: Mapping[str, Any]) -> tuple[Need, ...]:
        return (divergence, *self._both(divergence), SourceEntropy("teacher", divergence.temperature))

    def wrap_values(self, divergence: Divergence, view: View) -> PerToken:
        reverse, forward = (plain(need, view) for need in self._both(divergence))
        found = plain(divergence, view)
        selected = view.scalar(SourceEntropy("teacher", divergence.temperature)) > self.threshold
        values = torch.where(selected, reverse.values + self.forward_weight * forward.values, found.values)
        ran = f"{found.ran}; where H(T) > {self.threshold:g}: {reverse.ran} + {self.forward_weight:g} × {forward.ran}"
        return PerToken(values, ran, found.metrics | {"entropy_selected": Mean.of(selected)})

    def _both(self, divergence: Divergence) -> tuple[Divergence, Divergence]:
        return replace(divergence, alpha=1.0, normalised=False), replace(divergence, alpha=0.0, normalised=False)

    def needs(self, batch: Batch, state: Mapping[str, Any]) -> tuple[Need, ...]:
        return tuple(dict.fromkeys(self.wrap_needs(self.divergence(batch, alpha=1.0), state)))

    def evaluate(self, view: View) -> Value:
        found = self.wrap_values(self.divergence(view.batch, alpha=1.0), view)
        metrics = found.metrics | {"divergence": Mean.of(found.values)}
        return Value(view.token_mean(found.values), found.ran, metrics)
