"""Distillation, SDPO and its options, TAID and the entropy-aware form, alone and as wrappers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from earnest.errors import ObjectiveError, SignalError
from earnest.objectives import SDPO, TAID, Distill, EntropyAware, Objective
from earnest.objectives.needs import Divergence, LogProb, SourceEntropy
from earnest.objectives.teacher_term import covered
from earnest.objectives.view import Field
from earnest.signals import Batch, FullLogits, Hidden, Teacher, TopK
from tests.objectives.support import V, full_batch

NEED = Divergence("teacher", 0.5)


def three_rows(**more: object) -> Batch:
    """Rows of 2, 1 and 2 tokens; the teacher covers rows 0 and 2."""
    batch = Batch.from_rows(
        [[1]] * 3,
        [[2, 3], [2], [4, 5]],
        group=[0, 0, 0],
        behaviour=[[-1.0, -1.0], [-1.0], [-1.0, -1.0]],
        correct=[True, False, False],
    )
    return batch.with_signals(teacher=Teacher(FullLogits(torch.zeros(4, V)), torch.tensor([0, 1, 3, 4])), **more)


def run(
    term: Distill, batch: Batch, divergence: list[float], lp: list[float] | None = None
) -> tuple[float, list[float], dict[str, float]]:
    leaf = torch.tensor(divergence, dtype=torch.float64, requires_grad=True)
    assert batch.teacher is not None
    need = term.need(batch)
    scalars = {need: Field(leaf, batch.teacher.at, "given"), LogProb(): Field(torch.tensor(lp or [-1.0] * 5).double())}
    Objective.of(term).check(batch)
    result = Objective.of(term).evaluate(batch, scalars, {})
    metrics = {k: m.value for k, m in result.values[term.label].metrics.items()}
    return float(result.loss.detach()), torch.autograd.grad(result.loss, leaf)[0].tolist(), metrics


def test_distill_is_the_mean_over_the_covered_tokens() -> None:
    """Four of five tokens have a teacher: the term divides by 4 and reports that 80 % were covered and 1 row left
    out."""
    loss, grad, metrics = run(Distill(), three_rows(), [1.0, 2.0, 3.0, 4.0])
    assert loss == pytest.approx(2.5) and grad == pytest.approx([0.25] * 4)
    assert metrics["coverage"] == pytest.approx(0.8) and metrics["rows_left_out"] == 1


def test_sdpo_by_hand() -> None:
    """ρ = e^{lp - q} = [1, e^1→2, e^{-1}, 1]: each token's divergence times min(ρ, 2), over 4 covered tokens."""
    lp = [-1.0, -0.0, -1.0, -2.0, -1.0]
    loss, grad, metrics = run(SDPO(support="full"), three_rows(), [1.0, 2.0, 3.0, 4.0], lp)
    assert grad == pytest.approx([1 / 4, 2 / 4, math.exp(-1) / 4, 1 / 4])
    assert loss == pytest.approx((1 + 4 + 3 * math.exp(-1) + 4) / 4)
    assert metrics["clip_high"] == 0.25 and metrics["ratio_max"] == pytest.approx(math.e)
    assert run(SDPO(support="full", importance_clip=None), three_rows(), [1.0, 2.0, 3.0, 4.0], lp)[0] == pytest.approx(
        2.5
    )


def test_the_importance_ratio_is_exact_also_outside_the_top_k() -> None:
    """A review: a sampled token outside the top-K got -20 as its log-prob, and that went into the ratio.

    Here the exact log-prob is a need of its own, so the ratio of an unlikely token is exact.
    """
    batch, policy = full_batch()
    lp = policy.logprobs(batch)
    at = covered(batch)
    rare = batch.with_signals(behaviour=torch.where(at, lp - 0.5, lp))
    plain = policy.gradient(rare, SDPO(top_k=1, importance_clip=None))
    torch.testing.assert_close(policy.gradient(rare, SDPO(top_k=1, importance_clip=10.0)), math.exp(0.5) * plain)
    assert policy.evaluate(rare, SDPO(top_k=1)).values["sdpo"].metrics["ratio"].value == pytest.approx(math.exp(0.5))


def test_the_ratio_is_a_weight_without_gradient() -> None:
    """sg[min(ρ, c)]: SDPO's gradient has no part through lp."""
    batch, _ = full_batch()
    lp = torch.full((batch.active.shape[0],), -1.0, dtype=torch.float64, requires_grad=True)
    term = SDPO(support="full")
    assert batch.teacher is not None
    d = torch.ones(len(batch.teacher.distribution), dtype=torch.float64, requires_grad=True)
    loss = (
        Objective.of(term)
        .evaluate(batch, {term.need(batch): Field(d, batch.teacher.at), LogProb(): Field(lp)}, {})
        .loss
    )
    assert torch.autograd.grad(loss, lp, allow_unused=True)[0] is None


def test_sc_sdpo_weighs_prompts_by_the_variance_of_success() -> None:
    """p̂ = 1/3: √(2/9). A prompt without a success has weight 0, and a metric gives the share of prompts with a
    weight."""
    term = SDPO(support="full", importance_clip=None, weighting="success_variance")
    loss, _, metrics = run(term, three_rows(), [1.0, 2.0, 3.0, 4.0])
    assert loss == pytest.approx(2.5 * math.sqrt(2 / 9)) and metrics["prompts_with_weight"] == 1.0
    failed = three_rows(correct=torch.zeros(3, dtype=torch.bool))
    assert (
        run(term, failed, [1.0, 2.0, 3.0, 4.0])[0] == 0 and run(term, failed, [1.0] * 4)[2]["prompts_with_weight"] == 0
    )
    alone = replace(three_rows(), group=torch.tensor([0, 1, 2]))  # one answer per prompt: p̂ is 0 or 1
    assert run(term, alone, [1.0, 2.0, 3.0, 4.0])[0] == 0
    assert not term.additive and SDPO().additive, "a group's rate needs rows of other micro-batches"


def test_srpo_routes_failed_rows_here() -> None:
    """Row 2 is the only failed row with a teacher: the mean is over its two tokens."""
    loss, grad, _ = run(SDPO(support="full", importance_clip=None, route="failed"), three_rows(), [1.0, 2.0, 3.0, 4.0])
    assert loss == pytest.approx(3.5) and grad == pytest.approx([0, 0, 0.5, 0.5])


def test_a_row_without_a_teacher_is_left_out_not_zero() -> None:
    """Row 1 of the full batch has no teacher: changing its hidden states changes nothing."""
    batch, policy = full_batch()
    before = policy.gradient(batch, SDPO(top_k=4))[: policy.hidden.numel()].view_as(policy.hidden)
    mine = batch.row == 1
    assert not before[mine].any() and before[(batch.row == 0)].any()
    with torch.no_grad():
        policy.hidden[mine] += 1.0
    after = policy.gradient(batch, SDPO(top_k=4))[: policy.hidden.numel()].view_as(policy.hidden)
    torch.testing.assert_close(after, before)


def test_a_teacher_equal_to_the_student_costs_nothing() -> None:
    batch, policy = full_batch()
    assert batch.teacher is not None and batch.teacher.at is not None
    same = batch.with_signals(teacher=Teacher(Hidden(policy.hidden.detach()[batch.teacher.at]), batch.teacher.at))
    for term in (Distill(), Distill(alpha=0.0), Distill(alpha=1.0), SDPO(top_k=4), TAID(), EntropyAware(threshold=1.0)):
        assert float(policy.evaluate(same, term).loss.detach()) == pytest.approx(0, abs=1e-12)
        assert policy.gradient(same, term).abs().max() < 1e-12
        assert policy.gradient(batch, term).abs().max() > 1e-3


@pytest.mark.parametrize("term", [Distill(), SDPO(top_k=4), TAID(), EntropyAware(threshold=1.2)], ids=lambda t: t.kind)
def test_a_step_against_the_gradient_nears_the_teacher(term: Distill) -> None:
    """Only this test detects a sign error. A review found a distillation term that was always 0; it would not change
    anything."""
    batch, policy = full_batch(perturb=0.8)
    probe = Distill(alpha=0.5)
    before = float(policy.evaluate(batch, probe).loss.detach())
    grad = policy.gradient(batch, term)[: policy.hidden.numel()].view_as(policy.hidden)
    with torch.no_grad():
        policy.hidden -= 1e-2 * grad
    assert float(policy.evaluate(batch, probe).loss.detach()) < before - 1e-6


def test_ran_comes_from_the_code_that_ran() -> None:
    """A review: the first step used a scalar objective and reported the top-K one.

    The label comes out of the vocabulary pass.
    """
    batch, policy = full_batch()
    said = lambda term: policy.evaluate(batch, term).values[term.label].ran  # noqa: E731
    assert (
        "full_gjs" in said(Distill()) and "topk_gjs" in said(SDPO(top_k=4)) and "student's top 4" in said(SDPO(top_k=4))
    )
    assert "full_reverse_kl" in said(Distill(alpha=1.0)) and "full_forward_kl" in said(Distill(alpha=0.0))
    assert said(TAID(t_start=0.25)).startswith("taid of") and "blend 0.25" in said(TAID(t_start=0.25))
    assert "H(T) > 1.2" in said(EntropyAware(threshold=1.2)) and "min(ρ, 2)" in said(SDPO(top_k=4))
    metrics = policy.evaluate(batch, SDPO(top_k=4)).values["sdpo"].metrics
    assert 0 < metrics["covered_mass"].value < 1, "the support's coverage travels with the divergence"


# --- support --------------------------------------------------------------------------------------------------------


def test_the_default_support_of_sdpo_is_the_students_top_100() -> None:
    batch, _ = full_batch()
    assert SDPO().need(batch) == Divergence("teacher", 0.5, False, "student", 100, "bucket", 1.0)
    assert SDPO(support="full").need(batch) == Divergence("teacher", 0.5)


def _received(batch: Batch, k: int) -> Batch:
    """The same teacher as the response of a service: its own top-k."""
    assert batch.teacher is not None
    g = torch.Generator().manual_seed(3)
    lp = torch.randn(len(batch.teacher.distribution), V, generator=g).double().log_softmax(-1)
    top = lp.topk(k)
    tail = torch.log1p(-top.values.exp().sum(-1))
    return batch.with_signals(teacher=replace(batch.teacher, distribution=TopK(top.indices, top.values, tail)))


def test_a_received_top_k_serves_the_teachers_support_and_is_refused_on_the_students() -> None:
    batch, policy = full_batch()
    received = _received(batch, 5)
    assert SDPO(support="teacher").need(received).top_k is None
    assert policy.gradient(received, SDPO(support="teacher")).abs().max() > 1e-3
    assert policy.gradient(received, SDPO(support="teacher", wrap=TAID())).abs().max() > 1e-3
    assert policy.gradient(received, SDPO(support="teacher", wrap=EntropyAware(threshold=0.5))).abs().max() > 1e-3
    assert "renormalised" in policy.evaluate(received, TAID(support="teacher")).values["taid"].ran
    with pytest.raises(SignalError, match="student"):
        policy.evaluate(received, SDPO())
    with pytest.raises(SignalError, match="sent 5 of 13"):
        policy.evaluate(received, Distill())


def test_the_unnormalised_tail_is_for_the_reverse_kl() -> None:
    batch, policy = full_batch()
    assert policy.gradient(batch, SDPO(alpha=1.0, top_k=3, tail="unnormalised")).abs().max() > 1e-3
    with pytest.raises(ObjectiveError, match="sdpo: tail 'unnormalised' is a reverse KL"):
        policy.evaluate(batch, SDPO(top_k=3, tail="unnormalised"))


# --- TAID -----------------------------------------------------------------------------------------------------------


def test_taid_alone_is_the_forward_kl_to_the_blend() -> None:
    """KL(p_t‖S) with p_t = softmax((1-t)·sg[z_S] + t·z_T), by hand on the logits."""
    batch, policy = full_batch()
    assert batch.teacher is not None and batch.teacher.at is not None
    at, t = batch.teacher.at, 0.3
    z = (policy.hidden @ policy.head.weight.T)[at]
    teacher = batch.teacher.distribution.states @ policy.head.weight.T  # type: ignore[union-attr]
    blend = ((1 - t) * z.detach() + t * teacher).log_softmax(-1)
    loss = (blend.exp() * (blend - z.log_softmax(-1))).sum(-1).mean()
    expected = torch.autograd.grad(loss, policy.hidden)[0].flatten()
    term = TAID(t_start=0.3)
    torch.testing.assert_close(policy.evaluate(batch, term).loss, loss)
    torch.testing.assert_close(policy.gradient(batch, term)[: policy.hidden.numel()], expected)
    torch.testing.assert_close(policy.gradient(batch, Distill(alpha=0.0, wrap=term)), policy.gradient(batch, term))


def test_taid_at_t_1_is_the_teacher_itself() -> None:
    batch, policy = full_batch()
    torch.testing.assert_close(policy.gradient(batch, TAID(t_start=1.0)), policy.gradient(batch, Distill(alpha=0.0)))
    wrapped = SDPO(alpha=0.3, top_k=4, wrap=TAID(t_start=1.0))
    torch.testing.assert_close(policy.gradient(batch, wrapped), policy.gradient(batch, SDPO(alpha=0.3, top_k=4)))


def test_taids_schedule_by_hand() -> None:
    """t_start 0.4, 10 steps, α_t 0.5, β 0.9.

    Losses 2, then 1: relative change ½, m = 0.05, t = 0.46 + 0.5·σ(0.05)·0.54.
    """
    term = TAID(t_start=0.4, steps=10, rate=0.5, momentum=0.9)
    state = term.advance(term.initial_state(), 9.9, {"divergence": 2.0})
    assert state == {"t": pytest.approx(0.46), "momentum": 0.0, "previous": 2.0, "step": 1}
    state = term.advance(state, 9.9, {"divergence": 1.0})
    assert state["momentum"] == pytest.approx(0.05)
    assert state["t"] == pytest.approx(0.46 + 0.5 / (1 + math.exp(-0.05)) * 0.54)


def test_taids_t_only_rises_and_ends_at_the_end() -> None:
    term = TAID(steps=20, t_end=0.9)
    state, seen = term.initial_state(), []
    g = torch.Generator().manual_seed(0)
    for _ in range(30):
        seen.append(state["t"])
        state = term.advance(state, 0.0, {"divergence": float(torch.rand((), generator=g)) * 3})
    assert seen == sorted(seen) and seen[0] == 0.4 and state["t"] == 0.9
    fast = TAID(steps=20, rate=0.3)
    ahead = fast.initial_state()
    for _ in range(5):
        ahead = fast.advance(ahead, 0.0, {"divergence": 1.0})
    assert ahead["t"] > 0.4 + 0.6 * 5 / 20, "the rate pushes t beyond the schedule's floor"
    slow, quick = (TAID(steps=20, rate=0.3, momentum=m) for m in (0.99, 0.1))
    path = lambda x: x.advance(x.advance(x.initial_state(), 0, {"divergence": 3.0}), 0, {"divergence": 0.1})["t"]  # noqa: E731
    assert path(quick) > path(slow)


def test_the_state_of_a_wrapper_is_the_channels_and_drives_the_need() -> None:
    batch, policy = full_batch()
    objective = Objective.of(SDPO(top_k=4, wrap=TAID(t_start=0.2, steps=4)))
    state = objective.initial_state()
    blends = []
    for _ in range(5):
        result = policy.evaluate(batch, objective, state)
        need = next(n for n in objective.needs(batch, state) if isinstance(n, Divergence))
        blends.append(need.blend)
        assert result.values["sdpo"].metrics["taid_t"].value == need.blend
        state = objective.advance(state, result.values)
    assert blends[0] == 0.2 and blends[-1] == 1.0 and blends == sorted(blends)  # type: ignore[type-var]


# --- entropy-aware --------------------------------------------------------------------------------------------------


def test_entropy_aware_by_hand() -> None:
    """H(T) = [0.5, 2]; h = 1: the first token costs RKL = 3, the second RKL + 2·FKL = 4 + 2·7."""
    batch = Batch.from_rows([[1]], [[2, 3]]).with_signals(teacher=Teacher(FullLogits(torch.zeros(2, V))))
    term = EntropyAware(threshold=1.0, forward_weight=2.0)
    reverse, forward, entropy = term.needs(batch, {})
    assert (reverse, forward) == (Divergence("teacher", 1.0), Divergence("teacher", 0.0)) and entropy == SourceEntropy(
        "teacher"
    )
    leaf = {n: torch.tensor(v).double().requires_grad_() for n, v in ((reverse, [3.0, 4.0]), (forward, [5.0, 7.0]))}
    scalars = {n: Field(v, None, "x") for n, v in leaf.items()} | {
        entropy: Field(torch.tensor([0.5, 2.0]).double(), None, "x")
    }
    result = Objective.of(term).evaluate(batch, scalars, {})
    assert float(result.loss.detach()) == pytest.approx((3 + 18) / 2)
    assert [x.tolist() for x in torch.autograd.grad(result.loss, list(leaf.values()))] == [[0.5, 0.5], [0, 1.0]]
    assert result.values["entropy_aware"].metrics["entropy_selected"].value == 0.5


def test_entropy_aware_wraps_and_stands_alone() -> None:
    """Around the reverse KL the wrapper is the method itself.

    Around another divergence it replaces it on the selected tokens only.
    """
    batch, policy = full_batch()
    alone = EntropyAware(threshold=1.2)
    torch.testing.assert_close(policy.gradient(batch, Distill(alpha=1.0, wrap=alone)), policy.gradient(batch, alone))
    nothing = Distill(alpha=0.5, wrap=EntropyAware(threshold=math.log(V)))
    torch.testing.assert_close(policy.gradient(batch, nothing), policy.gradient(batch, Distill(alpha=0.5)))
    everything = Distill(alpha=0.5, wrap=EntropyAware(threshold=0.0))
    both = policy.gradient(batch, Distill(alpha=1.0)) + policy.gradient(batch, Distill(alpha=0.0))
    torch.testing.assert_close(policy.gradient(batch, everything), both)


def test_gradcheck_on_the_divergence() -> None:
    batch = three_rows()
    assert batch.teacher is not None
    for term in (
        Distill(),
        SDPO(support="full"),
        SDPO(support="full", weighting="success_variance", importance_clip=1.1),
    ):
        need = term.need(batch)
        lp = Field(torch.tensor([-0.5, -1.5, -1.0, -0.2, -3.0]).double())

        def loss(d: Tensor, term: Distill = term, need: Divergence = need, lp: Field = lp) -> Tensor:
            assert batch.teacher is not None
            return Objective.of(term).evaluate(batch, {need: Field(d, batch.teacher.at), LogProb(): lp}, {}).loss

        assert torch.autograd.gradcheck(loss, (torch.rand(4).double().requires_grad_(),))


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_the_share_of_a_mixture_is_between_0_and_1(alpha: float) -> None:
    assert Distill(alpha=1.0).alpha == 1.0
    with pytest.raises(ObjectiveError, match="alpha"):
        Distill(alpha=alpha)
