"""Barrier, spectral cap and entropy bonus: numbers by hand, exact zeros at zero divergence in every dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from earnest.engines.vocabulary import scalars as fused
from earnest.engines.vocabulary.eager import scalars as eager
from earnest.errors import ObjectiveError, SignalError
from earnest.objectives import EntropyBonus, KLBarrier, Objective, SpectralCap, calibrate_tau
from earnest.objectives.needs import Divergence, Entropy, Need, SpectralNorm
from earnest.objectives.trust import AGGREGATES, aggregate
from earnest.objectives.view import Field
from earnest.signals import Batch, FullLogits, Hidden, Reference
from tests.objectives.support import Policy, full_batch

# 60 positions: coherent text, and a loop of four tokens.
LOOP = [0.028] * 30 + [3.78, 8.14, 5.5, 4.0] + [0.028] * 26


def barrier_batch(n: int) -> Batch:
    return Batch.from_rows([[1]], [[2] * n]).with_signals(reference=Reference(None, FullLogits(torch.zeros(n, 3))))


def run(term: KLBarrier, values: Tensor, state: dict | None = None) -> tuple[Tensor, Tensor]:
    batch = barrier_batch(len(values))
    leaf = values.detach().clone().requires_grad_()
    objective = Objective.of(term)
    objective.check(batch)
    need: Need = term.need
    loss = objective.evaluate(batch, {need: Field(leaf, None, "given")}, {"kl_barrier": state} if state else {}).loss
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def test_a_loop_of_4_in_60_tokens_by_each_aggregate() -> None:
    """The mean hides it, the rmse does not; coherent text alone has about 0.03 by each."""
    found = {over: float(aggregate(torch.tensor(LOOP), over)) for over in AGGREGATES}
    assert {k: round(v, 2 if k == "mean" else 1) for k, v in found.items()} == {
        "mean": 0.38,
        "rmse": 1.5,
        "p95": 3.8,
        "max": 8.1,
    }
    calm = torch.tensor([0.028] * 60)
    assert all(round(float(aggregate(calm, over)), 2) == 0.03 for over in AGGREGATES)
    # τ = 1 is below the rmse of the loop and above its mean
    assert run(KLBarrier(tau=1.0, over="rmse"), torch.tensor(LOOP))[0] > 0.4
    assert run(KLBarrier(tau=1.0, over="mean"), torch.tensor(LOOP))[0] == 0


def test_slopes_by_hand() -> None:
    """x = [3, 4]: mean slope ½ each.

    Rmse = √12.5, slope x/(2·rmse); p95 = 3.95, slopes 0.05 and 0.95; max slope 0, 1.
    """
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)
    root = 12.5**0.5
    for over, slope in {"mean": [0.5, 0.5], "rmse": [1.5 / root, 2 / root], "p95": [0.05, 0.95], "max": [0, 1]}.items():
        loss, grad = run(KLBarrier(tau=1.0, over=over, strength=2.0), x)
        assert grad.tolist() == pytest.approx([2 * s for s in slope])
        assert float(loss) == pytest.approx(2 * (float(aggregate(x, over)) - 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("over", AGGREGATES)
@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_at_zero_divergence_the_gradient_is_exactly_zero(over: str, dtype: torch.dtype, tau: float) -> None:
    """A review found sqrt(mean(x²) + 1e-8): the eps is 0 in fp16, so 0/0 at the first step.

    And quantile refuses bf16.
    """
    for n in (1, 2, 60):
        loss, grad = run(KLBarrier(tau=tau, over=over), torch.zeros(n, dtype=dtype))
        assert float(loss) == 0 and grad.dtype == dtype and torch.equal(grad, torch.zeros(n, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_through_the_vocabulary_pass_a_policy_at_its_reference_has_zero_gradient(
    dtype: torch.dtype, direction: str
) -> None:
    """From hidden states on: both passes over the vocabulary, every aggregate, τ = 0, gradient exactly 0."""
    batch, _ = full_batch()
    policy = Policy(batch, dtype=dtype)
    assert batch.reference is not None
    home = batch.with_signals(reference=Reference(None, Hidden(policy.hidden.detach())))
    for over in AGGREGATES:
        term = KLBarrier(tau=0.0, over=over, direction=direction)
        for scalars in (eager, fused):
            objective = Objective.of(term)
            found = scalars(policy.hidden, policy.head, home, objective.needs(home, {}))
            loss = objective.evaluate(home, found, {}).loss
            (grad,) = torch.autograd.grad(loss, policy.hidden)
            assert float(loss.detach()) == 0 and torch.equal(grad, torch.zeros_like(grad)), (over, scalars.__module__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("over", AGGREGATES)
def test_sixteen_bits_agree_with_float64(over: str, dtype: torch.dtype) -> None:
    """Large (fp16 squares overflow at 256) and tiny values: the aggregate is taken in float32."""
    for scale in (1e-3, 1.0, 300.0):
        values = (torch.rand(37, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)
        exact = aggregate(values.double(), over)
        assert float(aggregate(values, over)) == pytest.approx(float(exact), rel=1e-5)
        assert torch.isfinite(run(KLBarrier(tau=0.0, over=over), values)[1]).all()


@given(st.lists(st.floats(0, 50), min_size=1, max_size=80))
def test_p95_is_the_interpolated_quantile_and_aggregates_are_ordered(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    found = {over: float(aggregate(x, over)) for over in AGGREGATES}
    assert found["p95"] == pytest.approx(float(torch.quantile(x, 0.95)), abs=1e-9)
    assert (
        found["mean"] <= found["rmse"] + 1e-9
        and found["rmse"] <= found["max"] + 1e-9
        and found["p95"] <= found["max"] + 1e-9
    )


@pytest.mark.parametrize("over", AGGREGATES)
def test_gradcheck(over: str) -> None:
    x = torch.tensor([0.3, 2.0, 0.9, 1.4], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: aggregate(v, over), (x,))


def test_an_empty_mask_is_refused_not_nan() -> None:
    with pytest.raises(SignalError, match="no position"):
        aggregate(torch.zeros(0), "mean")


def test_below_tau_the_gradient_is_zero() -> None:
    loss, grad = run(KLBarrier(tau=2.0, over="rmse"), torch.tensor([0.5, 1.0]))
    assert float(loss) == 0 and not grad.any()


def test_the_barrier_spans_all_roles_and_both_directions() -> None:
    batch, policy = full_batch()
    for direction, alpha in (("reverse", 1.0), ("forward", 0.0)):
        term = KLBarrier(tau=0.0, over="mean", direction=direction)
        assert term.needs(batch, {}) == (Divergence("reference", alpha=alpha),)
        z = policy.hidden @ policy.head.weight.T
        z0 = batch.reference.distribution.states @ policy.head.weight.T  # type: ignore[union-attr]
        p, p0 = z.log_softmax(-1), z0.log_softmax(-1)
        kl = (p.exp() * (p - p0)).sum(-1) if direction == "reverse" else (p0.exp() * (p0 - p)).sum(-1)
        result = policy.evaluate(batch, term)
        torch.testing.assert_close(result.loss, kl.mean())
        assert result.values["kl_barrier"].metrics["positions"].value == batch.active.shape[0]
        assert ("reverse_kl" if direction == "reverse" else "forward_kl") in result.values["kl_barrier"].ran


def test_lambda_decays_or_grows_over_rounds() -> None:
    x = torch.tensor([2.0, 2.0])
    objective = Objective.of(KLBarrier(tau=1.0, over="mean", growth=-1.0))
    state = objective.initial_state()
    for expected in (1.0, 1 / 2, 1 / 3):
        term = objective.terms[0].term
        assert isinstance(term, KLBarrier)
        assert float(run(term, x, state["kl_barrier"])[0]) == pytest.approx(expected)
        state = objective.next_round(state)
    assert float(run(KLBarrier(tau=1.0, over="mean", growth=2.0), x, {"round": 2})[0]) == pytest.approx(9.0)


def test_tau_is_calibrated_on_a_healthy_batch() -> None:
    """τ = margin × the aggregate: the healthy batch is below τ and the loop above it, for every aggregate."""
    healthy = torch.tensor([0.02, 0.05, 0.03, 0.01] * 15)
    for over in AGGREGATES:
        tau = calibrate_tau(healthy, over, margin=2.0)
        assert tau == pytest.approx(2 * float(aggregate(healthy, over)))
        barrier = KLBarrier(tau=tau, over=over)
        assert float(run(barrier, healthy)[0]) == 0 and float(run(barrier, torch.tensor(LOOP))[0]) > 0
    batch, policy = full_batch()
    bare = KLBarrier(over="rmse")
    set_tau = bare.calibrated(batch, policy.scalars(batch, bare.needs(batch, {})), margin=0.5)
    assert set_tau.tau == pytest.approx(0.5 * float(policy.evaluate(batch, KLBarrier(tau=0.0)).loss.detach()))
    with pytest.raises(ObjectiveError, match="equals its reference"):
        calibrate_tau(torch.zeros(4))
    with pytest.raises(ObjectiveError, match="margin"):
        calibrate_tau(healthy, margin=0.0)


def test_a_step_against_the_gradient_brings_the_policy_back() -> None:
    batch, policy = full_batch(perturb=1.0)
    for over in AGGREGATES:
        term = KLBarrier(tau=0.0, over=over)
        before = float(policy.evaluate(batch, term).loss.detach())
        grad = policy.gradient(batch, term)[: policy.hidden.numel()].view_as(policy.hidden)
        with torch.no_grad():
            policy.hidden -= 1e-3 * grad
        assert float(policy.evaluate(batch, term).loss.detach()) < before


def test_spectral_cap_by_hand() -> None:
    """σ = [0.5, 2, 3], cap 1: mean(0, 1, 2) = 1, slopes 0, ⅓, ⅓; at σ = 0 (at initialization) the slope is 0."""
    batch = barrier_batch(3)
    sigma = torch.tensor([0.5, 2.0, 3.0], requires_grad=True)
    need = SpectralNorm()
    result = Objective.of(SpectralCap(cap=1.0)).evaluate(batch, {need: Field(sigma, None, "given")}, {})
    assert float(result.loss.detach()) == 1.0
    assert torch.autograd.grad(result.loss, sigma)[0].tolist() == pytest.approx([0, 1 / 3, 1 / 3])
    found = result.values["spectral_cap"].metrics
    assert found["capped"].value == pytest.approx(2 / 3) and found["sigma_max"].value == 3.0
    at_source = torch.zeros(2, requires_grad=True)
    loss = Objective.of(SpectralCap()).evaluate(batch, {need: Field(at_source, None, "given")}, {}).loss
    assert not torch.autograd.grad(loss, at_source)[0].any()


def test_a_barrier_describes_itself_and_lists_its_settings_for_rounds() -> None:
    assert KLBarrier().of_rounds() == () and KLBarrier(growth=0.5).of_rounds() == ("growth",)
    assert KLBarrier(reference="previous").of_rounds() == ("reference",)
    term, batch = KLBarrier(tau=0.25), barrier_batch(2)
    result = Objective.of(term).evaluate(batch, {term.need: Field(torch.ones(2), None, "given")}, {})
    assert result.values["kl_barrier"].ran.endswith("against base, tau 0.25")


def test_an_inactive_term_is_activated_at_half_of_the_measured_value_and_an_active_one_is_unchanged() -> None:
    cap, barrier = SpectralCap(cap=1.0), KLBarrier(tau=1.0)
    assert cap.activated({"sigma": 0.4, "sigma_max": 0.9}).cap == 0.2
    assert barrier.activated({"aggregate": 0.5}).tau == 0.25
    assert cap.activated({"sigma": 0.4, "sigma_max": 1.1}) is cap
    assert barrier.activated({"aggregate": 1.5}) is barrier


def test_the_entropy_bonus_raises_entropy() -> None:
    batch, policy = full_batch(temperature=0.8)
    need = Entropy(0.8)
    rollouts = batch.has_role(("rollout",))[batch.row]
    before = policy.scalars(batch, [need])[need].values[rollouts].mean().detach()
    result = policy.evaluate(batch, EntropyBonus())
    torch.testing.assert_close(result.loss.detach(), -before)
    grad = policy.gradient(batch, EntropyBonus())[: policy.hidden.numel()].view_as(policy.hidden)
    with torch.no_grad():
        policy.hidden -= 1e-2 * grad
    assert policy.scalars(batch, [need])[need].values[rollouts].mean() > before
