"""SDPO with sequence-level credit, for the comparison of credit levels: a term for recipes that import this file.

    token      ∇L = mean_t  (log S(y_t) - log T(y_t)) · ∇log S(y_t)
    sequence   ∇L = mean_t  D_row · ∇log S(y_t),      D_row = mean over the row of log S(y_t) - log T(y_t)

It needs the sampled form (`engine: {estimator: sampled}`) of the reverse KL (`alpha: 1`) on the whole vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from earnest.objectives.base import Value
from earnest.objectives.distill import SDPO
from earnest.objectives.needs import LogProb
from earnest.objectives.registry import register
from earnest.objectives.view import View


@register
@dataclass(frozen=True, kw_only=True)
class SequenceSDPO(SDPO):
    """Self-distillation from feedback in which all tokens of a completion share one credit."""

    kind: ClassVar[str] = "sdpo_sequence"
    equation: ClassVar[str] = "mean_t sg[mean_row(log S - log T)]·log S(y_t)"

    def evaluate(self, view: View) -> Value:
        found = self.per_token(view)
        apart = found.values.detach()
        logprob = view.scalar(LogProb(view.batch.temperature))
        credit = view.row_mean(apart)[view.segment]
        values = apart + credit * (logprob - logprob.detach())
        return Value(view.token_mean(values), f"{found.ran}, one credit per row", found.metrics)
