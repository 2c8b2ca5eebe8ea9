"""Preferences: the chosen answer of each pair should be more likely than the rejected one.

    DPO     h = [lp_c - lp₀_c] - [lp_r - lp₀_r],  lp summed over the completion
            sigmoid     -logσ(βh);  with smoothing ε: -(1-ε)·logσ(βh) - ε·logσ(-βh)
            ipo         (h̄ - 1/2β)²,  h̄ from the means over the tokens
            hinge       relu(1 - βh)
            robust      [-(1-ε)·logσ(βh) + ε·logσ(-βh)] / (1-2ε)
    SimPO   -logσ(β(mean lp_c - mean lp_r) - γ),  no reference

``Batch.pair`` gives the two rows of a pair; their order has no meaning. logσ is computed as one function, without
overflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from earnest.errors import ObjectiveError
from earnest.objectives.base import LogProbTerm, Signal, Value
from earnest.objectives.metrics import Mean, Metric
from earnest.objectives.needs import LogProb, Need
from earnest.objectives.registry import register
from earnest.objectives.view import View
from earnest.settings import setting
from earnest.signals.batch import Batch, Role


@dataclass(frozen=True, kw_only=True)
class Preference(LogProbTerm):
    """Base of losses on pairs. The two rows may be in different micro-batches, so the loss needs the whole batch."""

    roles: ClassVar[tuple[Role, ...]] = ("chosen", "rejected")

    @property
    def additive(self) -> bool:
        return False

    def mean(
        self,
        view: View,
        losses: Float[Tensor, " P"],
        chosen: Float[Tensor, " P"],
        rejected: Float[Tensor, " P"],
        ran: str,
    ) -> Value:
        """The mean over pairs, with the implicit rewards as metrics."""
        metrics: dict[str, Metric] = {
            "accuracy": Mean.of(chosen > rejected),
            "margin": Mean.of(chosen - rejected),
            "reward_chosen": Mean.of(chosen),
            "reward_rejected": Mean.of(rejected),
        }
        return Value(losses.sum() / (view.counts.sequences / 2), ran, metrics)


def smoothed(logit: Float[Tensor, " P"], epsilon: float) -> Float[Tensor, " P"]:
    """-(1-ε)·logσ(x) - ε·logσ(-x)."""
    return -(1 - epsilon) * logsigmoid(logit) - epsilon * logsigmoid(-logit)


@register
@dataclass(frozen=True, kw_only=True)
class DPO(Preference):
    """Direct preference optimisation against the reference policy."""

    kind: ClassVar[str] = "dpo"
    paper: ClassVar[str] = (
        "DPO, arXiv 2305.18290; ipo 2310.12036, hinge 2305.10425, robust 2403.00409, smoothing: Mitchell 2023 (cDPO)"
    )
    equation: ClassVar[str] = "-logσ(β[(lp_c - lp₀_c) - (lp_r - lp₀_r)])"

    beta: float = setting(0.1, "β: strength of the constraint to the reference (larger: closer); ipo's τ", above=0.0)
    loss: str = setting("sigmoid", "the shape of the loss", choices=("sigmoid", "ipo", "hinge", "robust"))
    smoothing: float = setting(
        0.0, "ε: assumed share of pairs with a wrong label (sigmoid and robust)", at_least=0.0, below=0.5
    )

    def validate(self) -> None:
        if self.smoothing and self.loss in ("ipo", "hinge"):
            raise ObjectiveError(
                f"{self.label}: smoothing {self.smoothing} has no effect with loss {self.loss!r}; use 'sigmoid' or "
                "'robust', or leave it at 0."
            )
        if self.loss == "robust" and not self.smoothing:
            raise ObjectiveError(
                f"{self.label}: loss 'robust' at smoothing 0 is 'sigmoid'; give the share of wrong labels, e.g. "
                "smoothing=0.1."
            )

    def signals(self) -> frozenset[Signal]:
        return frozenset({"reference.logprobs"})

    def evaluate(self, view: View) -> Value:
        gap = view.logprobs - view.reference
        chosen, rejected = view.pairs()
        reward = (view.row_mean(gap) if self.loss == "ipo" else view.row_sum(gap)) * self.beta
        logit = reward[chosen] - reward[rejected]
        if self.loss == "ipo":
            losses = (logit / self.beta - 1 / (2 * self.beta)).square()
        elif self.loss == "hinge":
            losses = torch.relu(1 - logit)
        elif self.loss == "robust":
            losses = (-(1 - self.smoothing) * logsigmoid(logit) + self.smoothing * logsigmoid(-logit)) / (
                1 - 2 * self.smoothing
            )
        else:
            losses = smoothed(logit, self.smoothing)
        ran = f"dpo {self.loss}" + (f", smoothing {self.smoothing:g}" if self.smoothing else "")
        return self.mean(view, losses, reward[chosen], reward[rejected], ran)


@register
@dataclass(frozen=True, kw_only=True)
class SimPO(Preference):
    """Preferences by the mean log-prob per token, with a margin and without a reference."""

    kind: ClassVar[str] = "simpo"
    paper: ClassVar[str] = "SimPO, arXiv 2405.14734"
    equation: ClassVar[str] = "-logσ(β(mean lp_c - mean lp_r) - γ)"

    beta: float = setting(2.0, "β: scale of the difference of mean log-probs", above=0.0)
    gamma: float = setting(
        0.5, "γ: the margin by which the chosen answer must win, in units of the logit", at_least=0.0
    )
    smoothing: float = setting(0.0, "ε: assumed share of pairs with a wrong label", at_least=0.0, below=0.5)

    def needs(self, batch: Batch, state: Mapping[str, Any]) -> tuple[Need, ...]:
        return (LogProb(),)

    def evaluate(self, view: View) -> Value:
        reward = self.beta * view.row_mean(view.scalar(LogProb()))
        chosen, rejected = view.pairs()
        losses = smoothed(reward[chosen] - reward[rejected] - self.gamma, self.smoothing)
        return self.mean(view, losses, reward[chosen], reward[rejected], "simpo")
