"""The sampled form: its expectation over the whole vocabulary is the exact gradient, and so is that of the K weighted
targets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from earnest.engines.vocabulary import sampled
from earnest.engines.vocabulary.support import compare
from earnest.errors import ObjectiveError, SignalError
from earnest.objectives.needs import Divergence
from earnest.signals.distributions import TopK
from tests.vocabulary.cases import ALPHAS, normal, top_k

V = 9


def gradient(value: Tensor, z: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(value.sum(), z)
    return grad


def expected(A: Tensor, z: Tensor) -> Tensor:
    """-Σ_y S(y)·A(y)·∇log S(y), summed over all V tokens: the mean gradient of the loss -A·log S on samples."""
    logp = z.log_softmax(-1)
    return gradient(-(logp.detach().exp() * A.detach() * logp).sum(-1), z)


@pytest.mark.parametrize("normalised", [False, True])
@given(alpha=st.sampled_from((*ALPHAS, 0.03, 0.71)), seed=st.integers(0, 1000), size=st.floats(0.1, 4))
def test_the_expectation_is_the_gradient(normalised: bool, alpha: float, seed: int, size: float) -> None:
    z, t = normal(seed, 2, V, size=size).requires_grad_(), normal(seed + 1, 2, V, size=size)
    need = Divergence("teacher", alpha, normalised=normalised)
    ls, lt = z.detach().log_softmax(-1), t.log_softmax(-1)
    A = sampled.advantages(ls.flatten(), lt.flatten(), need).view(2, V)
    torch.testing.assert_close(expected(A, z), gradient(compare(z, t, need).value, z), rtol=1e-9, atol=1e-12)


def grouped(z: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """For every token the log-mass of its category (itself, or the bucket), and whether it is among the K."""
    logp = z.detach().log_softmax(-1)
    inside = torch.zeros_like(logp, dtype=torch.bool).scatter(-1, ids, True)
    tail = logp.masked_fill(inside, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.where(inside, logp, tail), inside


TOP_K: list[Divergence] = [
    *(Divergence("teacher", a, support=s, top_k=3) for a in ALPHAS for s in ("student", "teacher")),  # type: ignore[arg-type]
    Divergence("teacher", 0.3, support="student", top_k=3, normalised=True),
    Divergence("teacher", 1.0, support="teacher", top_k=3, tail="unnormalised"),
]


@pytest.mark.parametrize("need", TOP_K, ids=str)
def test_the_expectation_is_the_gradient_on_a_top_k(need: Divergence) -> None:
    z, t = normal(1, 4, V, size=2).requires_grad_(), normal(2, 4, V, size=2)
    found = compare(z, t, need)
    assert found.ids is not None
    (ls, inside), (lt, _) = grouped(z, found.ids), grouped(t, found.ids)
    A = sampled.advantages(ls.flatten(), lt.flatten(), need, inside=inside.flatten()).view(4, V)
    torch.testing.assert_close(expected(A, z), gradient(found.value, z), rtol=1e-9, atol=1e-12)


RENORMALISED = [Divergence("teacher", a, support="teacher", top_k=3, tail="renormalise") for a in ALPHAS]


@pytest.mark.parametrize("need", [*TOP_K, *RENORMALISED], ids=str)
@pytest.mark.parametrize("blend", [None, 0.4])
def test_weighted_targets_have_the_exact_gradient(need: Divergence, blend: float | None) -> None:
    """Σ w·∇log S over K targets, tail included: what a cross-entropy with K targets a position then does."""
    need = replace(need, blend=blend)
    z, t = normal(1, 4, V, size=2).requires_grad_(), normal(2, 4, V, size=2)
    ids = compare(z, t, replace(need, blend=None)).ids
    assert ids is not None
    student, teacher = top_k(z.detach(), 3, ids=ids), top_k(t, 3, ids=ids)
    w = sampled.target_weights(student, teacher, need)
    logp = z.log_softmax(-1).gather(-1, ids)
    found = compare(z, teacher, replace(need, top_k=None))
    torch.testing.assert_close(gradient(-(w * logp).sum(-1), z), gradient(found.value, z), rtol=1e-9, atol=1e-12)


def test_weighted_targets_over_the_whole_vocabulary() -> None:
    z, t = normal(1, 4, V).requires_grad_(), normal(2, 4, V)
    ids = torch.arange(V).expand(4, V)
    none = torch.full((4,), -torch.inf, dtype=torch.float64)
    for alpha in ALPHAS:
        need = Divergence("teacher", alpha)
        w = sampled.target_weights(
            TopK(ids, z.detach().log_softmax(-1), none), TopK(ids, t.log_softmax(-1), none), need
        )
        got = gradient(-(w * z.log_softmax(-1)).sum(-1), z)
        torch.testing.assert_close(got, gradient(compare(z, t, need).value, z), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_divergence_itself_as_advantage_teaches_nothing(alpha: float) -> None:
    """A reviewed engine used the position's divergence as its advantage: the expected gradient is 0, the right one's
    is not.
    """
    z, t = normal(1, 4, V).requires_grad_(), normal(2, 4, V)
    need = Divergence("teacher", alpha)
    value = compare(z, t, need).value
    assert float(expected(value[:, None].expand(4, V), z).abs().max()) < 1e-15
    assert float(gradient(value, z).abs().max()) > 1e-2


def test_a_sample_mean_approaches_the_gradient() -> None:
    """40,000 draws: five standard errors of every entry (a correct program fails about once in 20,000 runs of other
    seeds).
    """
    z, t = normal(1, 1, V).requires_grad_(), normal(2, 1, V)
    need = Divergence("teacher", 0.3)
    logp = z.log_softmax(-1)
    y = torch.multinomial(logp.detach().exp()[0], 40_000, replacement=True, generator=torch.Generator().manual_seed(0))
    A = sampled.advantages(logp.detach()[0, y], t.log_softmax(-1)[0, y], need)
    each = -A[:, None] * (torch.nn.functional.one_hot(y, V) - logp.detach().exp())
    error = each.mean(0) - gradient(compare(z, t, need).value, z)[0]
    assert bool((error.abs() < 5 * each.std(0) / 200).all())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, n: sampled.advantages(a, a[:2], n), "must agree"),
        (lambda a, n: sampled.advantages(a, a, replace(n, blend=0.5)), "use target_weights"),
        (
            lambda a, n: sampled.advantages(a, a, replace(n, support="teacher", tail="renormalise")),
            "use target_weights",
        ),
        (
            lambda a, n: sampled.advantages(a, a, replace(n, alpha=1.0, support="teacher", tail="unnormalised")),
            "inside",
        ),
    ],
)
def test_what_has_no_sampled_form_is_refused(call: Any, message: str) -> None:
    with pytest.raises((ObjectiveError, SignalError), match=message):
        call(-torch.rand(5), Divergence("teacher"))


def test_targets_of_two_supports_are_refused() -> None:
    z = normal(1, 2, V)
    with pytest.raises(SignalError, match="same ids"):
        sampled.target_weights(top_k(z, 3), top_k(-z, 3), Divergence("teacher", support="teacher"))
    with pytest.raises(ObjectiveError, match="temperature 1"):
        sampled.target_weights(top_k(z, 3), top_k(z, 3), Divergence("teacher", support="teacher", temperature=0.5))
