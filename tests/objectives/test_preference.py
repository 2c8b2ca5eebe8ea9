"""Preferences by hand, by law, and at margins where log(sigmoid) would be -inf."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from earnest.errors import SignalError
from earnest.objectives import DPO, Objective, SimPO, Term
from earnest.objectives.needs import LogProb
from earnest.objectives.view import Field
from earnest.signals import Batch, Reference


def pair_batch(lengths: tuple[int, ...] = (2, 1), **more: object) -> Batch:
    roles = ("chosen", "rejected") * (len(lengths) // 2)
    pairs = [i // 2 for i in range(len(lengths))]
    return Batch.from_rows([[1]] * len(lengths), [[2] * n for n in lengths], role=roles, pair=pairs).with_signals(
        **more
    )


def run(term: Term, batch: Batch, lp: list[float]) -> tuple[float, list[float], dict[str, float]]:
    leaf = torch.tensor(lp, dtype=torch.float64, requires_grad=True)
    Objective.of(term).check(batch)
    result = Objective.of(term).evaluate(batch, {LogProb(): Field(leaf)}, {})
    metrics = {k: m.value for k, m in result.values[term.label].metrics.items()}
    return float(result.loss.detach()), torch.autograd.grad(result.loss, leaf)[0].tolist(), metrics


def test_dpo_by_hand() -> None:
    """Chosen: lp -1, -2, ref -2, -3, so +2; rejected: lp -4, ref -3, so -1: h = 3. β = ½: logit 1.5.

    sigmoid  log(1+e^{-1.5}) = 0.201413, slope -β·σ(-1.5) = -0.5·0.182426 per chosen token, + for the rejected
    hinge    relu(1 - 1.5) = 0;  at β = 0.1: 1 - 0.3 = 0.7
    ipo      means per token: 1 - (-1) = 2; (2 - 1/(2·0.5))² = 1, slope by a chosen token 2·(2-1)/2 = 1
    """
    batch = pair_batch(reference=Reference(torch.tensor([-2.0, -3.0, -3.0])))
    lp = [-1.0, -2.0, -4.0]
    loss, grad, metrics = run(DPO(beta=0.5), batch, lp)
    assert loss == pytest.approx(0.2014133, rel=1e-5)
    assert grad == pytest.approx([-0.0912128, -0.0912128, 0.0912128], rel=1e-5)
    assert (metrics["accuracy"], metrics["margin"]) == (1.0, pytest.approx(1.5))
    assert run(DPO(beta=0.5, loss="hinge"), batch, lp)[0] == 0
    assert run(DPO(beta=0.1, loss="hinge"), batch, lp)[0] == pytest.approx(0.7)
    loss, grad, _ = run(DPO(beta=0.5, loss="ipo"), batch, lp)
    assert loss == pytest.approx(1.0) and grad == pytest.approx([1.0, 1.0, -2.0])
    smooth = run(DPO(beta=0.5, smoothing=0.1), batch, lp)[0]
    assert smooth == pytest.approx(0.9 * 0.2014133 + 0.1 * 1.7014133, rel=1e-5)
    robust = run(DPO(beta=0.5, loss="robust", smoothing=0.1), batch, lp)[0]
    assert robust == pytest.approx((0.9 * 0.2014133 - 0.1 * 1.7014133) / 0.8, rel=1e-5)


def test_robust_dpo_is_unbiased_under_flipped_labels() -> None:
    """The law that gives it its name: (1-ε)·L(h) + ε·L(-h) = the clean sigmoid loss."""
    ref = Reference(torch.zeros(2))
    epsilon, term = 0.2, DPO(beta=1.0, loss="robust", smoothing=0.2)
    right = run(term, pair_batch((1, 1), reference=ref), [-1.0, -2.5])[0]
    flipped = run(term, pair_batch((1, 1), reference=ref), [-2.5, -1.0])[0]
    clean = run(DPO(beta=1.0), pair_batch((1, 1), reference=ref), [-1.0, -2.5])[0]
    assert (1 - epsilon) * right + epsilon * flipped == pytest.approx(clean)


def test_simpo_by_hand() -> None:
    """Means -1.5 and -4, β = 2, γ = 0.5: logit 2·2.5 - 0.5 = 4.5, loss log(1+e^{-4.5}) = 0.0110477."""
    loss, grad, _ = run(SimPO(beta=2.0, gamma=0.5), pair_batch(), [-1.0, -2.0, -4.0])
    assert loss == pytest.approx(0.0110477, rel=1e-5)
    slope = 2.0 / (1 + math.exp(4.5))
    assert grad == pytest.approx([-slope / 2, -slope / 2, slope])


def test_a_reference_equal_to_the_policy_gives_log_2() -> None:
    batch = pair_batch((3, 2), reference=Reference(torch.tensor([-1.0, -2.0, -3.0, -1.0, -1.5])))
    assert run(DPO(beta=0.7), batch, [-1.0, -2.0, -3.0, -1.0, -1.5])[0] == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    "term", [DPO(beta=1.0), DPO(beta=1.0, loss="robust", smoothing=0.1), SimPO()], ids=lambda t: t.kind
)
def test_a_large_wrong_margin_is_linear_not_infinite(term: Term) -> None:
    """log(sigmoid(-800)) is -inf; logsigmoid is -800. A pair with a large wrong margin keeps its slope."""
    batch = pair_batch((1, 1), reference=Reference(torch.zeros(2)))
    loss, grad, _ = run(term, batch, [-800.0, -0.5])
    assert math.isfinite(loss) and loss > 500 and abs(grad[0]) > 0.5


def test_pairs_are_identified_by_id_not_by_order() -> None:
    """An unusual order: pair 5 before pair 2, rejected before chosen. The loss equals that of the usual order."""
    lp = {"c5": [-1.0, -1.0], "r5": [-2.0], "c2": [-0.5], "r2": [-3.0, -3.0, -1.0]}
    tidy = Batch.from_rows(
        [[1]] * 4, [[2] * len(v) for v in lp.values()], role=("chosen", "rejected") * 2, pair=[5, 5, 2, 2]
    )
    mixed_names = ["r2", "c5", "c2", "r5"]
    roles = tuple("chosen" if n[0] == "c" else "rejected" for n in mixed_names)
    mixed = Batch.from_rows(
        [[1]] * 4, [[2] * len(lp[n]) for n in mixed_names], role=roles, pair=[int(n[1]) for n in mixed_names]
    )
    a = run(SimPO(), tidy, [x for v in lp.values() for x in v])[0]
    b = run(SimPO(), mixed, [x for n in mixed_names for x in lp[n]])[0]
    assert a == pytest.approx(b)


@pytest.mark.parametrize(
    ("pair", "role", "words"),
    [
        ([0, 0, 1], ("chosen", "rejected", "chosen"), "pair 1 has only"),
        ([0, 0, 0], ("chosen", "rejected", "rejected"), "pair 0"),
        ([-1, 0, 0], ("chosen", "chosen", "rejected"), "pair -1"),
    ],
)
def test_broken_pairs_are_refused_by_name(pair: list[int], role: tuple[str, ...], words: str) -> None:
    batch = Batch.from_rows([[1]] * 3, [[2]] * 3, role=role, pair=pair)  # type: ignore[arg-type]
    with pytest.raises(SignalError, match=f"simpo: .*{words}"):
        run(SimPO(), batch, [-1.0, -1.0, -1.0])


def test_the_masked_token_of_a_completion_counts_neither_in_the_sum_nor_in_the_length() -> None:
    batch = pair_batch((3, 1))
    weight = batch.weight.clone()
    weight[0, 1] = 0.0
    assert run(SimPO(), batch.with_signals(weight=weight), [-1.0, -3.0, -2.0])[0] == pytest.approx(
        run(SimPO(), pair_batch((2, 1)), [-1.0, -3.0, -2.0])[0]
    )


@pytest.mark.parametrize(
    "term",
    [DPO(beta=0.5), DPO(loss="ipo"), DPO(beta=0.2, loss="hinge"), DPO(loss="robust", smoothing=0.2), SimPO()],
    ids=str,
)
def test_gradcheck(term: Term) -> None:
    batch = pair_batch((3, 1, 2, 4), reference=Reference(torch.linspace(-3, -1, 10).double()))

    def loss(lp: Tensor) -> Tensor:
        return Objective.of(term).evaluate(batch, {LogProb(): Field(lp)}, {}).loss

    lp = -3 * torch.rand(10, generator=torch.Generator().manual_seed(0)).double()
    assert torch.autograd.gradcheck(loss, (lp.requires_grad_(),))
