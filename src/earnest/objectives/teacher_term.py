"""Base of terms with a teacher: the covered tokens, the support of the comparison, and wrappers."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from earnest.errors import ObjectiveError
from earnest.objectives.base import Objective, Signal, Term
from earnest.objectives.metrics import Metric
from earnest.objectives.needs import Divergence
from earnest.objectives.view import View
from earnest.settings import setting
from earnest.signals.batch import Batch
from earnest.signals.distributions import TopK

DEFAULT_TOP_K = 100


@dataclass(frozen=True, eq=False)
class PerToken:
    """A divergence per token of a view, a description of what ran, and metrics."""

    values: Float[Tensor, " n"]
    ran: str
    metrics: dict[str, Metric] = field(default_factory=dict)


def plain(divergence: Divergence, view: View) -> PerToken:
    """The divergence without a wrapper, with the engine's description."""
    values = view.scalar(divergence)
    return PerToken(values, view.ran(divergence), dict(view.field(divergence).metrics or {}))


@dataclass(frozen=True, kw_only=True)
class TeacherTerm(Term):
    """A term that reads a teacher, on the tokens that the teacher covers."""

    laws: ClassVar[frozenset[str]] = frozenset({"zero_at_source"})

    support: str = setting(
        "full",
        "which tokens are compared: all, or the top-K of the student or the teacher",
        choices=("full", "student", "teacher"),
    )
    top_k: int | None = setting(
        None, f"K of a top-K support; none: {DEFAULT_TOP_K}, or all that a received top-K has", at_least=1
    )
    tail: str = setting(
        "bucket",
        "how the other tokens count: as one bucket, dropped and renormalised, or the unnormalised reverse KL on K",
        choices=("bucket", "renormalise", "unnormalised"),
    )
    temperature: float = setting(1.0, "both distributions are softmax(z/temperature)", above=0.0)

    def validate(self) -> None:
        if self.support == "full" and (self.top_k is not None or self.tail != "bucket"):
            raise ObjectiveError(
                f"{self.label}: support 'full' compares every token, so top_k {self.top_k} and tail {self.tail!r} "
                "have no effect; "
                "choose support='student' or 'teacher', or leave them out."
            )

    def signals(self) -> frozenset[Signal]:
        return frozenset({"teacher"})

    def selects(self, batch: Batch) -> Bool[Tensor, " N"]:
        return covered(batch)

    def empty(self) -> str | None:
        return "the teacher covers none of its tokens"

    def divergence(self, batch: Batch, alpha: float, normalised: bool = False) -> Divergence:
        """The need on this term's support."""
        received = batch.teacher is not None and isinstance(batch.teacher.distribution, TopK)
        k = self.top_k if self.support == "full" or received or self.top_k else DEFAULT_TOP_K
        if self.tail == "unnormalised" and alpha != 1:
            raise ObjectiveError(f"{self.label}: tail 'unnormalised' is a reverse KL; set alpha=1, or another tail.")
        return Divergence("teacher", alpha, normalised, self.support, k, self.tail, self.temperature)  # type: ignore[arg-type]

    def demand_bare(self, owner: str) -> None:
        """Refuse fields that a wrapper ignores: it has no support of its own."""
        for f in fields(TeacherTerm):
            if getattr(self, f.name) != f.default:
                raise ObjectiveError(
                    f"{owner}: wrap={type(self).__name__}({f.name}={getattr(self, f.name)!r}) would be ignored; set "
                    f"{f.name} on {owner} itself."
                )


def covered(batch: Batch) -> Bool[Tensor, " N"]:
    """The active tokens for which the batch's teacher has a distribution."""
    has = torch.zeros(batch.active.shape[0], dtype=torch.bool, device=batch.device)
    if batch.teacher is not None:
        has[... if batch.teacher.at is None else batch.teacher.at] = True
    return has


def supports(objective: Objective) -> set[tuple[str, int]]:
    """(support, K) of every live term that reads the teacher; K is 0 for every token of the vocabulary."""
    terms = [w.term for w in objective.live() if isinstance(w.term, TeacherTerm)]
    return {(t.support, 0 if t.support == "full" else t.top_k or DEFAULT_TOP_K) for t in terms}


def teacher_support(objective: Objective) -> tuple[str, int]:
    """(support, K) that a teacher with a head of its own has to supply; ("full", 0): every logit. A top-K is enough
    where all live terms compare on the same K tokens, at temperature 1 and without TAID, whose interpolation reads
    logits."""
    terms = [w.term for w in objective.live() if isinstance(w.term, TeacherTerm)]
    wanted = supports(objective)
    blends = any("taid" in (t.kind, getattr(getattr(t, "wrap", None), "kind", None)) for t in terms)
    if len(wanted) != 1 or blends or any(t.temperature != 1 for t in terms):
        return "full", 0
    return next(iter(wanted))
