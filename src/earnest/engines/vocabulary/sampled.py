"""A divergence for an engine without logits: as one advantage per sampled token, or as weights on K targets.

    A(y) = -∂D/∂S(y), up to a baseline
           GJS_α  (1-α)·log(M(y)/S(y))     normalised  log(M/S)/α     α = 1  log T - log S     α = 0  T/S
    E_{y~S}[A(y)·∇log S(y)] = -∇D         (the law; checked over the whole vocabulary)

    w_k = -∂D/∂log S_k = S_k·(A_k - A_tail), so that Σ_k w_k·∇log S_k = -∇D exactly, the tail included

The weights are the exact form: ``cross_entropy`` with K targets per position then has the local engine's gradient. The
advantage is for engines that take one number per token; its expected gradient is exact. The divergence of a position
cannot be its advantage: a number that does not depend on y has an expected gradient of 0.
Shapes: N tokens, K kept ones per token.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from earnest.engines.vocabulary import formulas
from earnest.engines.vocabulary.support import blended
from earnest.errors import ObjectiveError, SignalError
from earnest.objectives.needs import Divergence
from earnest.signals.distributions import TopK


def advantages(
    student: Float[Tensor, " N"],
    source: Float[Tensor, " _"],
    need: Divergence,
    *,
    inside: Bool[Tensor, " N"] | None = None,
) -> Float[Tensor, " N"]:
    """The sampled form of ``need``, from exact log-probs of the sampled tokens at the need's temperature.

    For a top-K with a bucket, a token outside the K takes its bucket's log-masses. ``inside`` marks the tokens among
    the K; only the unnormalised form, which is 0 outside, needs it. A renormalised top-K has no such form: use
    ``target_weights``.
    """
    if student.shape != source.shape:
        raise SignalError(
            f"log-probs of shape {tuple(student.shape)} and {tuple(source.shape)} must agree, one per sampled token."
        )
    if need.blend is not None:
        raise ObjectiveError(
            f"{need}: a blended source has a normaliser over the whole vocabulary; use target_weights."
        )
    if need.support != "full" and need.tail == "renormalise":
        raise ObjectiveError(
            f"{need}: renormalised over K tokens it depends on more than the sampled token; use target_weights."
        )
    value = _advantage(student, source, need)
    if need.support != "full" and need.tail == "unnormalised":
        if inside is None:
            raise SignalError(f"{need}: give inside=…, which marks the sampled tokens among the K.")
        return torch.where(inside, value, torch.zeros_like(value))
    return value


def estimates(
    student: Float[Tensor, " N"],
    source: Float[Tensor, " _"],
    need: Divergence,
    *,
    inside: Bool[Tensor, " N"] | None = None,
) -> Float[Tensor, " N"]:
    """The divergence itself, estimated at the sampled token: E_{y~S} of this is D. Arguments as for ``advantages``.

    α = 1: log S - log T;  α = 0: (T/S)·(log T - log S);  else α·(T/S)·log(T/M) - (1-α)·log(M/S)
    """
    if need.support != "full" and need.tail == "unnormalised":
        assert inside is not None, "advantages() asks for it"
        delta = source - student
        return torch.where(inside, torch.expm1(delta) - delta, torch.zeros_like(delta))
    if need.alpha == 1:
        return student - source
    if need.alpha == 0:
        return (source - student).exp() * (source - student)
    delta, u = formulas.log_mixture(student, source, need.alpha)
    value = need.alpha * delta.exp() * (delta - u) - (1 - need.alpha) * u
    return value / (need.alpha * (1 - need.alpha)) if need.normalised else value


def target_weights(student: TopK, source: TopK, need: Divergence) -> Float[Tensor, "N K"]:
    """Weights w[N, K] for the K targets ``student.ids``: the gradient of Σ w·log S is -∇D exactly. Both at the need's
    temperature 1."""
    if student.ids.shape != source.ids.shape or not torch.equal(student.ids, source.ids):
        raise SignalError("the student and the source must be scored at the same ids, in the same order.")
    if need.temperature != 1:
        raise ObjectiveError(
            f"{need}: a received top-K has no logits to divide by a temperature; the weights exist at temperature 1."
        )
    ls = torch.cat([student.logprobs, student.tail[:, None]], -1).log_softmax(-1)
    lt = torch.cat([source.logprobs, source.tail[:, None]], -1).log_softmax(-1)
    if need.tail == "renormalise":
        ls, lt = ls[:, :-1].log_softmax(-1), lt[:, :-1].log_softmax(-1)
    if need.blend is not None:
        lt = blended(ls, lt, need.blend)
    if need.tail == "renormalise":
        _, slope = formulas.gjs(ls, lt, need.alpha, normalised=need.normalised, slope=True)
        assert slope is not None
        return -slope
    # A bucket without mass on either side (K is the vocabulary) is its own baseline.
    value = _advantage(ls, lt, need)
    bucket = torch.zeros_like(value[:, -1:]) if need.tail == "unnormalised" else value[:, -1:]
    bucket = torch.where(torch.isfinite(bucket) & torch.isfinite(ls[:, -1:]), bucket, torch.zeros_like(bucket))
    return ls[:, :-1].exp() * (value[:, :-1] - bucket)


def _advantage(ls: Tensor, lt: Tensor, need: Divergence) -> Tensor:
    if need.alpha == 0:
        return (lt - ls).exp()
    if need.alpha == 1:
        return lt - ls
    _, u = formulas.log_mixture(ls, lt, need.alpha)
    return u / need.alpha if need.normalised else (1 - need.alpha) * u
