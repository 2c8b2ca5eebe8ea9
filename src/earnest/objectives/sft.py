"""Supervised fine-tuning: the negative log-likelihood of the target tokens.

    L = -Σ w·log π(y_t | y_<t) / Σ w

The end-of-sequence token is one of the targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from earnest.objectives.base import Term, Value
from earnest.objectives.metrics import Mean
from earnest.objectives.needs import LogProb, Need
from earnest.objectives.registry import register
from earnest.objectives.view import View
from earnest.signals.batch import Batch, Role


@register
@dataclass(frozen=True, kw_only=True)
class SFT(Term):
    """Weighted negative log-likelihood of demonstrations, over the whole batch's weights.

    Also takes K targets per position.
    """

    kind: ClassVar[str] = "sft"
    paper: ClassVar[str] = "maximum likelihood"
    equation: ClassVar[str] = "-Σ w·log π(y_t | y_<t) / Σ w"
    roles: ClassVar[tuple[Role, ...]] = ("demonstration",)
    many_targets: ClassVar[bool] = True

    def needs(self, batch: Batch, state: Mapping[str, Any]) -> tuple[Need, ...]:
        return (LogProb(),)

    def evaluate(self, view: View) -> Value:
        lp = view.scalar(LogProb())
        return Value(-view.token_mean(lp), self.kind, {"nll": Mean.of(-lp, view.weight)})
