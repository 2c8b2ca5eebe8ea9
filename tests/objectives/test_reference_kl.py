"""The KL estimators: values by hand, and the expected gradient of each, by summing over the whole vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from earnest.objectives import Objective, ReferenceKL
from earnest.objectives.needs import LogProb
from earnest.objectives.reference_kl import k2, k3
from earnest.objectives.view import Field
from earnest.signals import Batch, Reference

V = 6


def test_values_and_slopes_by_hand() -> None:
    """d = log 2: k2 = ½(log 2)² = 0.240227, slope d = 0.693147; k3 = ½ + log 2 - 1 = 0.193147, slope 1 - e^{-d} = ½."""
    batch = Batch.from_rows([[1]], [[2]]).with_signals(reference=Reference(torch.tensor([-2.0]).double()))
    for estimator, value, slope in [
        ("k2", 0.2402265, 0.6931472),
        ("k3", 0.1931472, 0.5),
        ("straight_through", 0.1931472, 0.6931472),
    ]:
        lp = torch.tensor([-2.0 + math.log(2)], dtype=torch.float64, requires_grad=True)
        loss = Objective.of(ReferenceKL(estimator=estimator)).evaluate(batch, {LogProb(): Field(lp)}, {}).loss
        assert float(loss.detach()) == pytest.approx(value, rel=1e-6)
        assert float(torch.autograd.grad(loss, lp)[0]) == pytest.approx(slope, rel=1e-6)


def expected_gradient(term: ReferenceKL, z: Tensor, z0: Tensor, zq: Tensor) -> Tensor:
    """E over the behaviour policy's tokens of the term's gradient by the logits: one row for each token."""
    logp, ref, q = z.log_softmax(-1), z0.log_softmax(-1), zq.log_softmax(-1)
    total = torch.zeros_like(z)
    for y in range(V):
        batch = Batch.from_rows([[1]], [[y]], behaviour=[[0.0]]).with_signals(
            behaviour=q[y : y + 1], reference=Reference(ref[y : y + 1])
        )
        loss = Objective.of(term).evaluate(batch, {LogProb(): Field(logp[y : y + 1])}, {}).loss
        total += q[y].exp() * torch.autograd.grad(loss, z, retain_graph=True)[0]
    return total


def _kl_gradients(z: Tensor, z0: Tensor) -> tuple[Tensor, Tensor]:
    p, p0 = z.log_softmax(-1), z0.log_softmax(-1)
    reverse = (p.exp() * (p - p0)).sum()
    forward = (p0.exp() * (p0 - p)).sum()
    return torch.autograd.grad(reverse, z, retain_graph=True)[0], torch.autograd.grad(forward, z)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("term", "off_policy", "whose"),
    [
        (ReferenceKL(estimator="k2"), False, "reverse"),
        (ReferenceKL(estimator="straight_through"), False, "reverse"),
        (ReferenceKL(estimator="k3"), False, "forward"),
        (ReferenceKL(estimator="k2", importance="detached"), True, "reverse"),
        (ReferenceKL(estimator="k3", importance="detached"), True, "forward"),
        (ReferenceKL(estimator="straight_through", importance="detached"), True, "reverse"),
        (ReferenceKL(estimator="k3", importance="attached"), True, "reverse"),
        (ReferenceKL(estimator="k3", importance="attached"), False, "reverse"),
    ],
    ids=lambda x: f"{x.estimator}-{x.importance}" if isinstance(x, ReferenceKL) else str(x),
)
def test_each_estimator_has_the_gradient_that_it_reports(
    term: ReferenceKL, off_policy: bool, whose: str, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(V, generator=g).double().requires_grad_()
    z0, zq = torch.randn(V, generator=g).double(), torch.randn(V, generator=g).double()
    found = expected_gradient(term, z, z0, zq if off_policy else z.detach())
    reverse, forward = _kl_gradients(z, z0)
    wanted, other = (reverse, forward) if whose == "reverse" else (forward, reverse)
    torch.testing.assert_close(found, wanted)
    assert (found - other).abs().max() > 1e-2, "the two gradients must be told apart"
    assert ("KL(π‖π₀)" if whose == "reverse" else "KL(π₀‖π)") in term.gradient
    assert term.gradient.endswith("on-policy") == (term.importance == "none")


def test_off_policy_without_the_ratio_it_is_the_gradient_of_neither_kl() -> None:
    """Why the report has "on-policy": on another policy's samples the plain estimators do not have the gradient of a
    KL."""
    g = torch.Generator().manual_seed(5)
    z = torch.randn(V, generator=g).double().requires_grad_()
    z0, zq = torch.randn(V, generator=g).double(), torch.randn(V, generator=g).double()
    for estimator in ("k2", "k3"):
        found = expected_gradient(ReferenceKL(estimator=estimator), z, z0, zq)
        assert all((found - kl).abs().max() > 1e-2 for kl in _kl_gradients(z, z0))


def test_the_gradient_of_k1_does_not_depend_on_the_reference() -> None:
    """Why k1 is refused: E∇(lp - lp₀) = E∇lp = 0 on-policy, for any reference."""
    z = torch.randn(V, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
    logp = z.log_softmax(-1)
    (grad,) = torch.autograd.grad((logp.exp().detach() * logp).sum(), z)
    torch.testing.assert_close(grad, torch.zeros(V).double())


@given(st.floats(-30, 30))
def test_the_estimators_are_never_negative_and_zero_only_at_zero(gap: float) -> None:
    d = torch.tensor([gap], dtype=torch.float64)
    assert float(k2(d)) >= 0 and float(k3(d)) >= 0
    if abs(gap) > 1e-3:
        assert float(k2(d)) > 0 and float(k3(d)) > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_k3_keeps_its_digits_near_zero(dtype: torch.dtype) -> None:
    """e^{-d} + d - 1 cancels; expm1 gives d²/2 up to rounding, while exp gives noise."""
    d = torch.tensor([1e-3], dtype=dtype)
    assert float(k3(d)) == pytest.approx(0.5e-6, rel=1e-3 if dtype == torch.float64 else 2e-2)


def test_all_three_estimates_are_metrics_for_every_loss() -> None:
    batch = Batch.from_rows([[1]], [[2, 3]]).with_signals(reference=Reference(torch.tensor([-1.0, -2.0]).double()))
    lp = torch.tensor([-1.5, -1.0]).double()
    value = Objective.of(ReferenceKL()).evaluate(batch, {LogProb(): Field(lp)}, {}).values["reference_kl"]
    assert value.metrics["k1"].value == pytest.approx(0.25) and value.metrics["gap_max"].value == 1.0
    assert value.metrics["k2"].value == pytest.approx((0.125 + 0.5) / 2)
    assert value.ran == "k2, gradient of KL(π‖π₀) on-policy"


def test_behaviour_log_probs_are_required_only_with_a_ratio() -> None:
    assert ReferenceKL().signals() == {"reference.logprobs"}
    assert ReferenceKL(importance="detached").signals() == {"reference.logprobs", "behaviour"}
