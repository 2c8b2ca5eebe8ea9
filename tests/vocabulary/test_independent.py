"""Against code that others wrote: TRL's generalised JSD and SDPO losses, Liger's chunked losses, values and gradients
by the hidden state.

Where they differ from this pass on purpose, the difference is pinned here.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction
from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDLoss
from liger_kernel.chunked_loss.simpo_loss import LigerFusedLinearSimPOLoss
from torch import Tensor
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.sdpo import loss_utils
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from earnest.engines.vocabulary import fused
from earnest.engines.vocabulary.support import compare
from earnest.objectives.needs import Divergence, Entropy, LogProb, Need
from earnest.signals.distributions import Hidden
from tests.vocabulary.cases import ALPHAS, make_batch, make_head, normal, with_sources

V, d, N = 50, 8, 10
HEAD = make_head(V, d)
BATCH = with_sources(make_batch(N, V), teacher=Hidden(normal(5, N, d)))
WEIGHT = normal(9, N).abs()  # no two tokens weigh the same


def teacher_logits() -> Tensor:
    return HEAD.logits(normal(5, N, d))


def ours(need: Need, weight: Tensor = WEIGHT) -> tuple[Tensor, Tensor]:
    hidden = normal(1, N, d).requires_grad_()
    values = fused.scalars(hidden, HEAD, BATCH, [need], budget_bytes=3 * V * 8 * 2)[need].values
    (grad,) = torch.autograd.grad((values * weight).sum(), hidden)
    return values.detach(), grad


def theirs(f: Any, weight: Tensor = WEIGHT) -> tuple[Tensor, Tensor]:
    hidden = normal(1, N, d).requires_grad_()
    values = f(HEAD.logits(hidden))
    (grad,) = torch.autograd.grad((values * weight).sum(), hidden)
    return values.detach(), grad


def assert_same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], rtol: float = 1e-9, atol: float = 1e-11) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trl_generalized_jsd(alpha: float, temperature: float) -> None:
    """GKD's loss has one number for all tokens; a token at a time shows every weight."""

    def gkd(z: Tensor) -> Tensor:
        t = teacher_logits()
        return torch.stack(
            [
                GKDTrainer.generalized_jsd_loss(
                    z[i][None, None], t[i][None, None], beta=alpha, temperature=temperature, reduction="sum"
                )
                for i in range(N)
            ]
        )

    assert_same(ours(Divergence("teacher", alpha, temperature=temperature)), theirs(gkd))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_trl_sdpo_full(alpha: float) -> None:
    def full(z: Tensor) -> Tensor:
        return loss_utils.compute_full_logit_self_distillation_loss(z, teacher_logits(), distillation_alpha=alpha)

    assert_same(ours(Divergence("teacher", alpha)), theirs(full))


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(("tail", "add_tail"), [("bucket", True), ("renormalise", False)])
@pytest.mark.parametrize("k", [1, 7])
def test_trl_sdpo_top_k(alpha: float, tail: Any, add_tail: bool, k: int) -> None:
    def top(z: Tensor) -> Tensor:
        return loss_utils.compute_topk_self_distillation_loss(
            z, teacher_logits(), distillation_topk=k, distillation_alpha=alpha, distillation_add_tail=add_tail
        )

    assert_same(
        ours(Divergence("teacher", alpha, support="student", top_k=k, tail=tail)), theirs(top), rtol=1e-7, atol=1e-9
    )


def test_trl_clamps_a_small_tail_and_we_do_not() -> None:
    """TRL makes the tail as log(1 - exp(min(lse, -1e-7))): below 1e-7 it is a constant without gradient. Ours is the
    remaining logits'.
    """
    z = torch.tensor([[0.0, -1.0, -40.0, -41.0]], dtype=torch.float64)
    kept = z.log_softmax(-1)[:, :2]
    theirs_tail = loss_utils.add_tail_bucket(kept)[0, -1]
    exact = z.log_softmax(-1)[0, 2:].logsumexp(0)
    assert float(theirs_tail) == pytest.approx(math.log(1e-7), abs=1e-3)
    need = Divergence("teacher", 1.0, support="student", top_k=2)
    found = compare(z, torch.tensor([[0.0, -0.5, -3.0, -4.0]], dtype=torch.float64), need, slope=True)
    assert found.student_tail is not None and found.categories is not None
    assert float(found.student_tail - z.logsumexp(-1)) == pytest.approx(float(exact), abs=1e-12)
    assert float(found.categories[0, -1]) != 0  # and it has a gradient


def test_trl_log_probs_and_entropy() -> None:
    assert_same(ours(LogProb(0.8)), theirs(lambda z: selective_log_softmax(z / 0.8, BATCH.token_target)))
    assert_same(ours(Entropy()), theirs(entropy_from_logits))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_liger_jsd(alpha: float) -> None:
    """Liger's loss is one number, the mean; so the weights are uniform here, and only here."""
    hidden = normal(1, N, d, dtype=torch.float32).requires_grad_()
    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=alpha, compiled=False, chunk_size=4)
    weight = HEAD.weight.detach().float().requires_grad_()  # it makes the head's gradient also for a frozen head
    value = loss(hidden, weight, normal(5, N, d, dtype=torch.float32), weight.detach(), BATCH.token_target)
    (grad,) = torch.autograd.grad(value, hidden)
    values, gradient = ours(Divergence("teacher", alpha), torch.full((N,), 1 / N, dtype=torch.float64))
    assert_same((value.detach(), grad), (values.mean(), gradient), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_liger_log_probs(temperature: float) -> None:
    hidden = normal(1, N, d, dtype=torch.float32).requires_grad_()
    values = _ChunkedSelectiveLogProbFunction.apply(
        hidden, HEAD.weight.detach().float(), BATCH.token_target, None, temperature, 16
    )
    (grad,) = torch.autograd.grad((values * WEIGHT.float()).sum(), hidden)
    assert_same((values.detach(), grad), ours(LogProb(temperature)), rtol=1e-4, atol=1e-5)


def test_liger_simpo_from_our_log_probs() -> None:
    """-log σ(β(mean lp_c - mean lp_r) - γ) over two pairs of five and five tokens, through our log-probs."""
    beta, gamma, T = 2.0, 0.5, 5
    batch = make_batch(4 * T, V)
    target = batch.token_target.view(4, T)
    states = normal(3, 4 * T, d, dtype=torch.float32)
    hidden = states.clone().requires_grad_()
    loss = LigerFusedLinearSimPOLoss(beta=beta, gamma=gamma, compute_nll_loss=False, compiled=False)
    value, *_ = loss(HEAD.weight.detach().float(), hidden.view(4, T, d), target)
    value = value if isinstance(value, Tensor) else value[0]
    (grad,) = torch.autograd.grad(value, hidden)
    mine = states.double().requires_grad_()
    logp = fused.scalars(mine, HEAD, batch, [LogProb()])[LogProb()].values.view(4, T).mean(-1)
    want = -torch.nn.functional.logsigmoid(beta * (logp[:2] - logp[2:]) - gamma).mean()
    (gradient,) = torch.autograd.grad(want, mine)
    assert_same((value.detach(), grad), (want.detach(), gradient), rtol=1e-4, atol=1e-6)
