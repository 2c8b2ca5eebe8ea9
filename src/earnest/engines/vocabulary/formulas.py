"""The divergences between two categorical distributions, each formula once (arXiv 2306.13649, arXiv 2601.20802).

    GJS_α(S, T) = α·KL(T‖M) + (1-α)·KL(S‖M),   M = (1-α)·S + α·T,   0 < α < 1
    α = 0: KL(T‖S)      α = 1: KL(S‖T)         (defined so; the family itself goes to 0 there)
    normalised: GJS_α / (α(1-α)), which tends to those two as α → 0 and α → 1

Everything is written in δ = log T - log S, so identical distributions cost exactly 0 with a gradient of exactly 0,
and a common shift of δ (the rounding of a log-sum-exp) cancels to first order. With u = log(M/S) = log1p(α·expm1(δ)):

    value  α·ΣT(δ-u) - (1-α)·ΣS·u          slope by the student's logits  (1-α)·S·(ΣS·u - u)

Shapes: n tokens, C categories (the vocabulary, or K tokens and the bucket of all others).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.engines.vocabulary.scratch import FRESH, Scratch

Result = tuple[Float[Tensor, " n"], Float[Tensor, "n C"] | None]


def gjs(
    ls: Float[Tensor, "n C"],
    lt: Float[Tensor, "n C"],
    alpha: float,
    *,
    normalised: bool = False,
    slope: bool = False,
    out: Scratch = FRESH,
) -> Result:
    """GJS_α of normalised log-probs, differentiable by ``ls``; with ``slope`` also ∂value/∂z where ls =
    log_softmax(z)."""
    if alpha == 0:
        return forward_kl(ls, lt, slope=slope, out=out)
    if alpha == 1:
        return reverse_kl(ls, lt, slope=slope, out=out)
    delta, u = log_mixture(ls, lt, alpha, out)
    S, T = torch.exp(ls, out=out(ls)), torch.exp(lt, out=out(lt))
    student = dot(S, u)  # -KL(S‖M)
    teacher = dot(T, torch.sub(delta, u, out=out.over(delta)))  # KL(T‖M)
    scale = 1 / (alpha * (1 - alpha)) if normalised else 1.0
    value = scale * (alpha * teacher - (1 - alpha) * student)
    return value, _spread(S, u, student, scale * (1 - alpha), out) if slope else None


def log_mixture(ls: Tensor, lt: Tensor, alpha: float, out: Scratch = FRESH) -> tuple[Tensor, Tensor]:
    """δ = log T - log S and u = log(M/S) of the mixture M = (1-α)·S + α·T, exactly 0 where S = T."""
    # Beyond ±limit the smaller of S and T is no part of M to rounding, so M/S or M/T has its limiting value there
    # already.
    limit = -math.log(torch.finfo(ls.dtype).eps / 2 * min(alpha, 1 - alpha))
    delta = torch.sub(lt, ls, out=out(ls))
    delta = torch.clamp(delta, -limit, limit, out=out.over(delta))
    u = torch.expm1(delta, out=out(ls))
    u = torch.mul(u, alpha, out=out.over(u))
    return delta, torch.log1p(u, out=out.over(u))


def forward_kl(
    ls: Float[Tensor, "n C"], lt: Float[Tensor, "n C"], *, slope: bool = False, out: Scratch = FRESH
) -> Result:
    """KL(T‖S) = Σ(T·δ - T + S); the last two sum to 0 and cancel the rounding of the normalisers."""
    delta = torch.sub(lt, ls, out=out(ls))
    # Where the teacher's probability is 0 its term is 0, also for a logit of -inf.
    delta = torch.clamp(delta, min=-1e4, out=out.over(delta))
    S, T = torch.exp(ls, out=out(ls)), torch.exp(lt, out=out(lt))
    difference = torch.sub(S, T, out=out.over(S))
    return dot(T, delta) + difference.sum(-1), difference if slope else None


def reverse_kl(
    ls: Float[Tensor, "n C"], lt: Float[Tensor, "n C"], *, slope: bool = False, out: Scratch = FRESH
) -> Result:
    """KL(S‖T) = Σ(T - S - S·δ). A teacher that gives 0 to a token that the student may say makes it infinite."""
    delta = torch.sub(lt, ls, out=out(ls))
    S, T = torch.exp(ls, out=out(ls)), torch.exp(lt, out=out(lt))
    expected = dot(S, delta)
    value = torch.sub(T, S, out=out.over(T)).sum(-1) - expected
    return value, _spread(S, delta, expected, 1.0, out) if slope else None


def _spread(S: Tensor, x: Tensor, expected: Tensor, factor: float, out: Scratch) -> Tensor:
    """factor·S·(E_S[x] - x): the derivative of -E_S[x] by the logits, x held fixed."""
    away = torch.sub(expected[:, None], x, out=out.over(x))
    spread = torch.mul(S, away, out=out.over(S))
    return spread if factor == 1 else torch.mul(spread, factor, out=out.over(spread))


def dot(a: Float[Tensor, "n C"], b: Float[Tensor, "n C"]) -> Float[Tensor, " n"]:
    return torch.linalg.vecdot(a, b)


def unnormalised_reverse_kl(ls: Float[Tensor, "n C"], lt: Float[Tensor, "n C"], *, slope: bool = False) -> Result:
    """Σ_K [S·(log S - log T) - S + T] over all categories but the last, which is the bucket of all other tokens: ≥ 0,
    0 iff equal on K.

    The bucket has no term of its own, but it moves with the student's normaliser, so it has a slope.
    """
    kept_s, kept_t = ls[:, :-1], lt[:, :-1]
    value, _ = reverse_kl(kept_s, kept_t)
    if not slope:
        return value, None
    by_logprob = torch.nn.functional.pad(kept_s.exp() * (kept_s - kept_t), (0, 1))  # ∂value/∂log S
    return value, by_logprob - ls.exp() * by_logprob.sum(-1, keepdim=True)


def entropy(logp: Float[Tensor, "n C"], *, slope: bool = False, out: Scratch = FRESH) -> Result:
    """-Σ p·log p; slope -p·(log p + entropy). A category of probability 0 has no part in it."""
    p = torch.exp(logp, out=out(logp))
    logp = torch.clamp(logp, min=-1e4, out=out(logp))
    value = -dot(p, logp)
    return value, _spread(p, logp, -value, 1.0, out) if slope else None


def log1mexp(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """log(1 - exp(x)) for x ≤ 0, by the branch that loses fewer digits (Mächler 2012)."""
    x = x.clamp(max=0)
    return torch.where(x > -0.6931471805599453, (-torch.expm1(x)).log(), torch.log1p(-x.exp()))


def tail_error_bound(logprobs: Float[Tensor, "n K"], tail: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """A bound on the relative error of a tail mass that was made as 1 - Σp from log-probs of this dtype (or float32,
    if wider).

    Every log-prob is rounded to eps/2 of its size, so Σp is off by at most eps/2·(1 + Σp·|log p|), and the tail by as
    much.
    """
    eps = max(torch.finfo(logprobs.dtype).eps, torch.finfo(torch.float32).eps)
    lp = logprobs.double().clamp(min=-1e4)
    absolute = eps / 2 * (1 + (lp.exp() * lp.abs()).sum(-1))
    return absolute / tail.double().exp().clamp(min=1e-300)
