"""The divergences by hand, by law and against float64 numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from earnest.engines.vocabulary import formulas
from tests.vocabulary.cases import ALPHAS, normal


def log(*p: float) -> torch.Tensor:
    return torch.tensor([p], dtype=torch.float64).log()


def test_kl_by_hand() -> None:
    """S = (1/2, 1/2), T = (3/4, 1/4): KL(T‖S) = 3/4·log(3/2) + 1/4·log(1/2); KL(S‖T) = 1/2·log(2/3) + 1/2·log 2 =
    1/2·log(4/3).
    """
    S, T = log(0.5, 0.5), log(0.75, 0.25)
    forward, slope = formulas.gjs(S, T, 0.0, slope=True)
    assert float(forward) == pytest.approx(0.75 * math.log(1.5) - 0.25 * math.log(2), abs=1e-15)
    assert slope is not None and slope.tolist() == [pytest.approx([-0.25, 0.25])]  # S - T
    reverse, slope = formulas.gjs(S, T, 1.0, slope=True)
    assert float(reverse) == pytest.approx(0.5 * math.log(4 / 3), abs=1e-15)
    # S·(log S/T - KL) = 1/2·(log(2/3) - 1/2·log(4/3)) = -1/4·log 3
    assert slope is not None and slope.tolist() == [pytest.approx([-math.log(3) / 4, math.log(3) / 4])]


def test_jensen_shannon_of_two_disjoint_coins_is_log_2() -> None:
    """S = (1, 0), T = (0, 1): M is the mixture, and GJS_α is the binary entropy of α, its largest value."""
    S = torch.tensor([[0.0, -200.0]])
    T = torch.tensor([[-200.0, 0.0]])
    for alpha in (0.1, 0.5, 0.9):
        value, slope = formulas.gjs(S, T, alpha, slope=True)
        entropy = -alpha * math.log(alpha) - (1 - alpha) * math.log(1 - alpha)
        assert float(value) == pytest.approx(entropy, rel=3e-6)
        assert slope is not None and bool(torch.isfinite(slope).all())
    assert float(formulas.gjs(S, T, 1.0)[0]) == pytest.approx(200.0)
    assert float(formulas.gjs(S, T, 0.0)[0]) == pytest.approx(200.0)


def test_gjs_weights_are_not_swapped() -> None:
    """α = 1/4, S = (1/2, 1/2), T = (1, 0) up to e^-600: M = (5/8, 3/8). Swapped mixture weights would give M = (7/8,
    1/8).
    """
    S, T = log(0.5, 0.5), torch.tensor([[0.0, -600.0]], dtype=torch.float64)
    want = 0.25 * math.log(8 / 5) + 0.75 * (0.5 * math.log(0.5 / 0.625) + 0.5 * math.log(0.5 / 0.375))
    assert float(formulas.gjs(S, T, 0.25)[0]) == pytest.approx(want, abs=1e-14)


def test_unnormalised_by_hand() -> None:
    """Kept: S = 1/2, T = 1/4; the rest is the bucket. 1/2·log 2 - 1/2 + 1/4."""
    value, slope = formulas.unnormalised_reverse_kl(log(0.5, 0.5), log(0.25, 0.75), slope=True)
    assert float(value) == pytest.approx(0.5 * math.log(2) - 0.25, abs=1e-15)
    a = 0.5 * math.log(2)  # ∂value/∂log S
    assert slope is not None and slope.tolist() == [pytest.approx([a / 2, -a / 2])]


def numpy_gjs(S: np.ndarray, T: np.ndarray, alpha: float) -> np.ndarray:
    def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return (p * (np.log(p) - np.log(q))).sum(-1)

    if alpha in (0.0, 1.0):
        return kl(T, S) if alpha == 0 else kl(S, T)
    M = (1 - alpha) * S + alpha * T
    return alpha * kl(T, M) + (1 - alpha) * kl(S, M)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_against_numpy_and_autograd(alpha: float) -> None:
    z = normal(1, 7, 13, size=3).requires_grad_()
    lt = normal(2, 7, 13, size=3).log_softmax(-1)
    value, slope = formulas.gjs(z.log_softmax(-1), lt, alpha, slope=True)
    np.testing.assert_allclose(
        value.detach().numpy(), numpy_gjs(z.detach().softmax(-1).numpy(), lt.exp().numpy(), alpha), rtol=1e-12
    )
    weight = normal(3, 7)
    (grad,) = torch.autograd.grad((value * weight).sum(), z)
    assert slope is not None
    torch.testing.assert_close(slope * weight[:, None], grad, rtol=1e-10, atol=1e-13)


logits = st.lists(st.floats(-30, 30), min_size=2, max_size=9)


@given(logits, st.data(), st.floats(0.01, 0.99))
def test_bounds_symmetry_and_continuity(z: list[float], data: st.DataObject, alpha: float) -> None:
    other = data.draw(st.lists(st.floats(-30, 30), min_size=len(z), max_size=len(z)))
    ls = torch.tensor([z], dtype=torch.float64).log_softmax(-1)
    lt = torch.tensor([other], dtype=torch.float64).log_softmax(-1)
    value, slope = formulas.gjs(ls, lt, alpha, slope=True)
    bound = -alpha * math.log(alpha) - (1 - alpha) * math.log(1 - alpha)
    assert -1e-14 <= float(value) <= bound + 1e-12
    assert slope is not None and abs(float(slope.sum())) < 1e-12  # a common shift of the logits changes nothing
    assert float(formulas.gjs(ls, lt, 0.5)[0]) == pytest.approx(float(formulas.gjs(lt, ls, 0.5)[0]), abs=1e-13)
    # exchanging the two sides exchanges α and 1-α
    assert float(value) == pytest.approx(float(formulas.gjs(lt, ls, 1 - alpha)[0]), abs=1e-12)


@pytest.mark.parametrize("end", [0.0, 1.0])
def test_the_normalised_family_is_continuous_and_the_plain_one_is_not(end: float) -> None:
    ls, lt = normal(4, 5, 9).log_softmax(-1), normal(5, 5, 9).log_softmax(-1)
    near = abs(end - 1e-6)
    limit, limit_slope = formulas.gjs(ls, lt, end, slope=True)
    value, slope = formulas.gjs(ls, lt, near, normalised=True, slope=True)
    torch.testing.assert_close(value, limit, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(slope, limit_slope, rtol=1e-4, atol=1e-5)
    assert float(formulas.gjs(ls, lt, near)[0].max()) < 1e-4 < float(limit.min())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_identical_is_exactly_zero(alpha: float, dtype: torch.dtype) -> None:
    ls = normal(6, 4, 5000, size=6, dtype=dtype).log_softmax(-1)
    value, slope = formulas.gjs(ls, ls.clone(), alpha, slope=True)
    assert value.eq(0).all()
    assert slope is not None and slope.eq(0).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_nearly_identical_keeps_its_digits_in_float32(alpha: float) -> None:
    """Logits 1e-3 apart over 50,000 tokens: about 5e-7·α(1-α) nats, where log S - log M in float32 has an error of
    1e-7 itself.
    """
    z, move = normal(7, 3, 50_000, size=2), normal(8, 3, 50_000, size=1e-3)
    exact, _ = formulas.gjs(z.log_softmax(-1), (z + move).log_softmax(-1), alpha)
    value, _ = formulas.gjs(z.float().log_softmax(-1), (z + move).float().log_softmax(-1), alpha)
    torch.testing.assert_close(value.double(), exact, rtol=2e-2, atol=0)


def test_a_teacher_that_rules_a_token_out() -> None:
    """Logit -inf in the teacher: no term where its probability multiplies; infinite, and so loud, in the reverse KL."""
    ls, lt = (
        normal(9, 1, 4).log_softmax(-1),
        torch.tensor([[0.0, 0.0, 0.0, -math.inf]], dtype=torch.float64).log_softmax(-1),
    )
    for alpha in (0.0, 0.1, 0.5, 0.9):
        value, slope = formulas.gjs(ls, lt, alpha, slope=True)
        assert torch.isfinite(value).all() and slope is not None and torch.isfinite(slope).all()
    assert float(formulas.gjs(ls, lt, 1.0)[0]) == math.inf


def test_entropy_by_hand_and_by_autograd() -> None:
    value, slope = formulas.entropy(log(0.5, 0.25, 0.25), slope=True)
    assert float(value) == pytest.approx(1.5 * math.log(2), abs=1e-15)
    assert slope is not None and slope.tolist() == [
        pytest.approx([-0.25 * math.log(2), math.log(2) / 8, math.log(2) / 8])
    ]
    z = normal(10, 5, 8, size=4).requires_grad_()
    value, slope = formulas.entropy(z.log_softmax(-1), slope=True)
    (grad,) = torch.autograd.grad(value.sum(), z)
    torch.testing.assert_close(slope, grad, rtol=1e-10, atol=1e-13)


@given(st.floats(-60, -1e-12))
def test_log1mexp(x: float) -> None:
    from decimal import Decimal, getcontext

    getcontext().prec = 50
    want = float((1 - Decimal(x).exp()).ln())
    assert float(formulas.log1mexp(torch.tensor([x], dtype=torch.float64))) == pytest.approx(
        want, rel=1e-13, abs=1e-300
    )


@given(st.floats(-14, -0.1))
def test_tail_error_bound_holds(log_tail: float) -> None:
    """The tail of float32 log-probs, made as 1 - Σp in float64, is off by no more than the bound says."""
    head = normal(13, 1, 20, size=2).log_softmax(-1) + math.log1p(-math.exp(log_tail))
    sent = head.float()
    made = formulas.log1mexp(sent.double().logsumexp(-1)).exp()
    bound = formulas.tail_error_bound(sent, torch.tensor([log_tail], dtype=torch.float64))
    assert abs(float(made) / math.exp(log_tail) - 1) <= float(bound)
    assert float(bound) < 5e-7 / math.exp(log_tail)
