"""Which tokens a divergence compares, and how it treats the others.

    full                 every token of the vocabulary
    student, teacher     the K most probable tokens of that side, plus one of
        bucket           one more category for all other tokens
        renormalise      nothing: both sides are normalised over the K tokens
        unnormalised     nothing: Σ_K [S(log S - log T) - S + T], for the reverse KL only

The bucket's log-mass is the log-sum-exp of the remaining logits, never 1 - Σp; only a received ``TopK`` brings its own.
Shapes: n tokens, V vocabulary, K kept tokens, C compared categories.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.engines.vocabulary import formulas
from earnest.engines.vocabulary.scratch import FRESH, Scratch
from earnest.objectives.metrics import Mean, Metric
from earnest.objectives.needs import Divergence
from earnest.signals.distributions import TopK


@dataclass(frozen=True, eq=False)
class VocabularyComparison:
    """A divergence on n tokens: its value, what ran, and (with ``slope``) its derivative by the compared categories'
    logits."""

    value: Float[Tensor, " n"]
    ran: str
    categories: Float[Tensor, "n C"] | None = None  # the derivative
    ids: Int[Tensor, "n K"] | None = None  # None: the categories are the vocabulary
    student_tail: Float[Tensor, " n"] | None = None  # log-sum-exp of the student's logits outside ids
    student_mass: Float[Tensor, " n"] | None = None
    teacher_mass: Float[Tensor, " n"] | None = None

    def by_logits(self, z: Float[Tensor, "n V"], out: Scratch = FRESH) -> Float[Tensor, "n V"]:
        """∂value/∂z: a category's derivative goes to its token; the bucket's is divided among the remaining tokens by
        the softmax of their logits.

        ``z`` are the logits divided by the temperature, and the derivative is by those.
        """
        assert self.categories is not None, "made with slope=True"
        if self.ids is None:
            return self.categories
        K = self.ids.shape[1]
        if self.categories.shape[1] == K:  # renormalised: the other tokens have a zero derivative
            buffer = out(z)
            spread = torch.zeros_like(z) if buffer is None else buffer.zero_()
        else:
            assert self.student_tail is not None
            spread = torch.sub(z, self.student_tail[:, None], out=out(z)).exp_().mul_(self.categories[:, K:])
        return spread.scatter_(-1, self.ids, self.categories[:, :K])


def compare(
    z: Float[Tensor, "n V"],
    source: Float[Tensor, "n V"] | TopK,
    need: Divergence,
    *,
    slope: bool = False,
    out: Scratch = FRESH,
) -> VocabularyComparison:
    """The divergence ``need`` between the student's logits, already divided by the temperature, and a source. Checked
    by ``plan``.

    Differentiable by ``z``; the source is a constant, even if it is blended with the student (TAID, arXiv 2501.16937).
    """
    V = z.shape[1]
    if isinstance(source, TopK) and source.ids.shape[1] == V:
        source = torch.empty_like(z).scatter_(-1, source.ids, source.logprobs.to(z.dtype))
    if need.temperature != 1 and not isinstance(source, TopK):
        source = torch.div(source, need.temperature, out=out(source))
    if not isinstance(source, TopK):
        if need.blend is not None:
            source = torch.lerp(z.detach(), source, need.blend, out=out(source))
        if need.support == "full" or need.top_k is None or need.top_k >= V:
            ls, lt = torch.log_softmax(z, -1, out=out(z)), torch.log_softmax(source, -1, out=out(source))
            value, slopes = formulas.gjs(ls, lt, need.alpha, normalised=need.normalised, slope=slope, out=out)
            return VocabularyComparison(value, f"full_{name_of(need)}{_blend_name(need)}", slopes)
        ids = (z.detach() if need.support == "student" else source).topk(need.top_k, -1, sorted=False).indices
        teacher = _grouped(source, ids, out).log_softmax(-1)
    else:
        ids, teacher = cut_to(source, need.top_k)
        teacher = teacher.to(z.dtype).log_softmax(-1)
    return on_support(_grouped(z, ids, out), teacher, ids, need, slope=slope, received=isinstance(source, TopK))


def on_support(
    grouped: Float[Tensor, "n C"],
    teacher: Float[Tensor, "n C"],
    ids: Int[Tensor, "n K"],
    need: Divergence,
    *,
    slope: bool,
    received: bool,
) -> VocabularyComparison:
    """``need`` between the student's logits and the source's log-masses of K tokens and their bucket; ``received``
    log-masses are at temperature 1."""
    teacher_mass = _mass(teacher)
    student = grouped.log_softmax(-1)
    tail, student_mass = grouped[:, -1].detach(), _mass(student)
    if received:
        teacher = teacher / need.temperature  # other than 1 only where the K tokens are renormalised below
    if need.tail == "renormalise":
        student, teacher = student[:, :-1].log_softmax(-1), teacher[:, :-1].log_softmax(-1)
    blend_name = _blend_name(need)
    if received and need.blend is not None:
        teacher = blended(student, teacher, need.blend)
        where = "support" if need.tail == "renormalise" else "support and tail"
        blend_name = f", blend {need.blend:.4g} of the log-probs on the {where}, renormalised"
    if need.tail == "unnormalised":
        value, slopes = formulas.unnormalised_reverse_kl(student, teacher, slope=slope)
        name = "unnormalised_reverse_kl"
    else:
        value, slopes = formulas.gjs(student, teacher, need.alpha, normalised=need.normalised, slope=slope)
        name = name_of(need)
    tail_name = "" if need.tail == "unnormalised" else f", {need.tail}"
    ran = f"topk_{name} on the {need.support}'s top {ids.shape[1]}{tail_name}{blend_name}"
    return VocabularyComparison(value, ran, slopes, ids, tail, student_mass, teacher_mass)


def mass_metrics(student: Tensor | None, teacher: Tensor | None) -> dict[str, Metric]:
    """The mean mass of both sides that a top-K support covers; nothing for the whole vocabulary."""
    if student is None or teacher is None:
        return {}
    return {"covered_mass": Mean.of(student), "covered_mass_source": Mean.of(teacher)}


def _blend_name(need: Divergence) -> str:
    return "" if need.blend is None else f", blend {need.blend:.4g} of the logits"


def blended(student: Float[Tensor, "n C"], teacher: Float[Tensor, "n C"], share: float) -> Float[Tensor, "n C"]:
    """TAID's teacher from category log-probs alone: softmax((1-t)·log S + t·log T), with the student held fixed."""
    return torch.lerp(student.detach(), teacher, share).log_softmax(-1)


def name_of(need: Divergence) -> str:
    if need.alpha in (0, 1):
        return "reverse_kl" if need.alpha == 1 else "forward_kl"
    return f"{'normalised_' if need.normalised else ''}gjs(alpha={need.alpha:.4g})"


def _grouped(z: Float[Tensor, "n V"], ids: Int[Tensor, "n K"], out: Scratch) -> Float[Tensor, "n C"]:
    """The K logits at ``ids`` and the log-sum-exp of all others."""
    rest = torch.scatter(z, -1, ids, float("-inf"), out=out(z)).logsumexp(-1, keepdim=True)
    return torch.cat([z.gather(-1, ids), rest], -1)


def cut_to(source: TopK, k: int | None) -> tuple[Int[Tensor, "n K"], Float[Tensor, "n C"]]:
    """The ids and log-masses of a received top-K, cut to its k most probable tokens; what is cut joins the tail."""
    if k is None or k == source.ids.shape[1]:
        return source.ids, torch.cat([source.logprobs, source.tail[:, None]], -1)
    order = source.logprobs.argsort(-1, descending=True)
    ordered = source.logprobs.gather(-1, order)
    tail = torch.cat([ordered[:, k:], source.tail[:, None]], -1).logsumexp(-1, keepdim=True)
    return source.ids.gather(-1, order[:, :k]), torch.cat([ordered[:, :k], tail], -1)


def _mass(logp: Float[Tensor, "n C"]) -> Float[Tensor, " n"]:
    return logp[:, :-1].detach().exp().sum(-1)
