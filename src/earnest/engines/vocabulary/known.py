"""A divergence from log-probs alone, for a student that is known at K tokens of a position, or at one.

    exact     D on the K tokens and their tail;   ∂D/∂log S_k = -w_k   (``sampled.target_weights``)
    sampled   an estimate at the sampled token y; its derivative by log S(y) is -A(y)   (``sampled.advantages``)

In both forms the field has the divergence's value and its gradient, as a graph on the given log-probs. The sampled
form is unbiased for tokens that the student sampled; the exact form does not depend on who sampled them.
Shapes: M covered tokens, K kept ones per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from earnest.engines.vocabulary import formulas, sampled
from earnest.engines.vocabulary.support import VocabularyComparison, compare, cut_to, mass_metrics, name_of
from earnest.errors import ObjectiveError, SignalError
from earnest.objectives.metrics import Mean
from earnest.objectives.needs import Divergence
from earnest.objectives.view import Field
from earnest.signals.distributions import ScoredAt, TopK

# A tail that was made as 1 - Σp from float32 log-probs is not known below this.
LEAST_TAIL = 1e-9


def tail_of(logprobs: Float[Tensor, "M K"]) -> Float[Tensor, " M"]:
    """log(1 - Σp), never below the rounding error of Σp."""
    total = logprobs.double().logsumexp(-1)
    return formulas.log1mexp(total.clamp(max=-LEAST_TAIL))


def cut(source: TopK, k: int | None) -> TopK:
    """A received top-K cut to its k most probable tokens; what is cut joins the tail."""
    ids, grouped = cut_to(source, k)
    return replace(source, ids=ids, logprobs=grouped[:, :-1], tail=grouped[:, -1])


def cut_logits(need: Divergence, logp: Float[Tensor, "M V"], student: Callable[[int], Int[Tensor, "M K"]]) -> TopK:
    """A source with all log-probs at the K tokens that ``need`` compares; ``student(K)`` are the student's top K."""
    assert need.top_k is not None, "terms name K for a source that has every logit"
    if need.support == "teacher":
        values, ids = logp.topk(need.top_k, -1)
        return TopK(ids, values, tail_of(values))
    ids = student(need.top_k)
    values = logp.gather(-1, ids)
    return ScoredAt(ids, values, tail_of(values))


def exact(need: Divergence, student: Float[Tensor, "M K"], source: TopK, at: Int[Tensor, " M"] | None) -> Field:
    """``need`` from the student's log-probs at ``source.ids`` (with their graph)."""
    if need.top_k is not None and need.top_k != source.ids.shape[1]:
        raise SignalError(f"{need}: the source has {source.ids.shape[1]} tokens per position; cut it to top_k first.")
    own = student.detach().double()
    theirs = TopK(source.ids, source.logprobs.double(), source.tail.double().clamp(min=tail_floor()))
    ours = TopK(source.ids, own.clamp(max=0), tail_of(own))
    weights = sampled.target_weights(ours, theirs, need)
    found = _compare(ours, theirs, need)
    masses = mass_metrics(found.student_mass, found.teacher_mass)
    moved = (weights * (student - student.detach())).sum(-1)
    return Field(found.value - moved, at, f"{found.ran} [(N,K) weights]", masses, found.ran, "exact")


def tail_floor() -> float:
    return float(torch.tensor(LEAST_TAIL, dtype=torch.float64).log())


def _compare(ours: TopK, theirs: TopK, need: Divergence) -> VocabularyComparison:
    """The formula of the vocabulary pass, on a vocabulary of the K tokens and one token for all others."""
    K = ours.ids.shape[1]
    z = torch.cat([ours.logprobs, ours.tail[:, None]], -1)
    ids = torch.arange(K, device=z.device).expand(z.shape[0], K)
    return compare(z, replace(theirs, ids=ids), replace(need, top_k=None))


@dataclass(frozen=True, eq=False)
class AtToken:
    """Both sides' log-masses of the sampled token's category: the token itself, or the bucket if it is not among K."""

    student: Float[Tensor, " M"]
    source: Float[Tensor, " M"]
    inside: Bool[Tensor, " M"] | None = None

    @classmethod
    def of(
        cls,
        token: Int[Tensor, " M"],
        student_token: Float[Tensor, " M"],
        source_token: Float[Tensor, " M"],
        student: TopK | None,
        source: TopK | None,
    ) -> AtToken:
        """From exact log-probs of the sampled tokens and, for a top-K support, both sides at the same K ids."""
        student_token, source_token = student_token.detach().double(), source_token.double()
        if student is None or source is None:
            return cls(student_token, source_token)
        inside = (source.ids == token[:, None]).any(-1)
        return cls(
            torch.where(inside, student_token, student.tail.double()),
            torch.where(inside, source_token, source.tail.double().clamp(min=tail_floor())),
            inside,
        )


def estimate(need: Divergence, logprob: Float[Tensor, " M"], sides: AtToken, at: Int[Tensor, " M"] | None) -> Field:
    """``need`` in its sampled form: ``logprob`` is log S(y) with its graph."""
    if need.temperature != 1:
        raise ObjectiveError(f"{need}: the sampled form needs log-probs at temperature 1.")
    advantage = sampled.advantages(sides.student, sides.source, need, inside=sides.inside)
    value = sampled.estimates(sides.student, sides.source, need, inside=sides.inside)
    if need.support == "full":
        where, metrics = "", {}
    else:
        assert sides.inside is not None
        where = f" on the {need.support}'s top {need.top_k}, {need.tail}"
        metrics = {"inside_support": Mean.of(sides.inside)}
    name = "unnormalised_reverse_kl" if where and need.tail == "unnormalised" else name_of(need)
    values = value - advantage * (logprob - logprob.detach())
    described = f"{name}{where}"
    return Field(values, at, f"sampled {described} [one advantage per token]", metrics, described, "sampled")
