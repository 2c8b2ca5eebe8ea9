"""The policy-gradient family by hand, by law and by exact gradients on the log-probs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from earnest.errors import SignalError
from earnest.objectives import (
    BNPO,
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    LUSPO,
    OBJECTIVES,
    RLOO,
    SAPO,
    DrGRPO,
    Objective,
    Reinforce,
    Term,
    TruncatedIS,
    build,
)
from earnest.objectives.needs import LogProb
from earnest.objectives.view import Field
from earnest.signals import Batch, with_advantages
from tests.objectives.support import full_batch

RATIO_KINDS = ("grpo", "dapo", "dr_grpo", "bnpo", "gspo", "luspo", "cispo", "sapo")


def rows(ratios: list[list[float]], advantages: list[float], q: float = -2.0, **more: object) -> tuple[Batch, Tensor]:
    """Rows whose tokens have these ratios to the behaviour policy, and the log-probs as a leaf."""
    behaviour = [[q] * len(row) for row in ratios]
    batch = Batch.from_rows(
        [[1]] * len(ratios),
        [[2] * len(row) for row in ratios],
        advantages=advantages,
        behaviour=behaviour,
        max_length=4,
    ).with_signals(**more)
    lp = torch.tensor([q + math.log(r) for row in ratios for r in row], dtype=torch.float64, requires_grad=True)
    return batch, lp


def run(term: Term, batch: Batch, lp: Tensor) -> tuple[float, list[float], dict[str, float]]:
    """(loss, ∂loss/∂lp, metrics)."""
    objective = Objective.of(term)
    objective.check(batch)
    result = objective.evaluate(batch, {LogProb(batch.temperature): Field(lp)}, {})
    (grad,) = torch.autograd.grad(result.loss, [lp])
    metrics = {k: m.value for k, m in result.values[term.label].metrics.items()}
    return float(result.loss.detach()), grad.tolist(), metrics


# --- by hand --------------------------------------------------------------------------------------------------------


def test_the_clip_by_hand() -> None:
    """ε = 0.2, one token per row, S = 6: the value is -min(ρA, clip(ρ)A)/6 and the slope by lp is -ρA/6 where not
    clipped.

    ρ:      1.0   1.5(A>0)  0.5(A>0)  0.5(A<0)  1.5(A<0)  1.1
    A:      2     1         1         -1        -1        1
    value: -2    -1.2      -0.5       0.8       1.5      -1.1     sum -2.5
    slope: -2     0        -0.5       0         1.5      -1.1
    """
    batch, lp = rows([[1.0], [1.5], [0.5], [0.5], [1.5], [1.1]], [2, 1, 1, -1, -1, 1])
    loss, grad, metrics = run(GRPO(clip=0.2), batch, lp)
    assert loss == pytest.approx(-2.5 / 6)
    assert grad == pytest.approx([-2 / 6, 0, -0.5 / 6, 0, 1.5 / 6, -1.1 / 6])
    assert (metrics["clip_low"], metrics["clip_high"]) == (pytest.approx(1 / 6), pytest.approx(1 / 6))
    assert metrics["ratio_max"] == pytest.approx(1.5)


def test_the_metrics_count_each_side_of_the_clip() -> None:
    """Unequal counts on each side, so that a reversed comparison is detected; k3 of the gap to the behaviour policy."""
    ratios, advantages = [0.5, 0.4, 1.5, 1.6, 1.7, 0.6], [-1.0, -1.0, -1.0, 1.0, 1.0, 1.0]
    # Inside the clip on either side, as the last two, nothing is clipped.
    batch, lp = rows([[r] for r in [*ratios, 0.9, 1.1]], [*advantages, -1.0, 1.0])
    _, _, metrics = run(GRPO(clip=0.2), batch, lp)
    assert metrics["clip_low"] == pytest.approx(2 / 8)  # ρ < 0.8 and A < 0: rows 0 and 1
    assert metrics["clip_high"] == pytest.approx(2 / 8)  # ρ > 1.2 and A > 0: rows 3 and 4
    flipped, lp = rows([[r] for r in [*ratios, 0.3]], [*(-a for a in advantages), 1.0])
    _, _, metrics = run(GRPO(clip=0.2), flipped, lp)
    assert metrics["clip_low"] == pytest.approx(1 / 7) and metrics["clip_high"] == pytest.approx(1 / 7)
    k3 = sum(r - 1 - math.log(r) for r in [*ratios, 0.3]) / 7
    assert metrics["behaviour_kl"] == pytest.approx(k3)


def test_the_dual_clip_bounds_only_ratios_above_it() -> None:
    """δ = 3: with A = -1 the value is min(ρ, 3), its slope ρ below and 0 above; A > 0 does not change."""
    batch, lp = rows([[1.5], [5.0], [1.1]], [-1, -1, 1])
    loss, grad, metrics = run(GRPO(clip=0.2, dual_clip=3.0), batch, lp)
    assert loss == pytest.approx((1.5 + 3.0 - 1.1) / 3)
    assert grad == pytest.approx([1.5 / 3, 0, -1.1 / 3]) and metrics["clip_dual"] == pytest.approx(1 / 3)


def test_bnpo_in_parts_by_hand() -> None:
    """Parts of 1 and 2 rows: each token mean counts by its part's share of the sequences."""
    batch, lp = rows([[1.0], [1.0, 1.0, 1.0], [1.0]], [1, 2, 4])
    objective = Objective.of(BNPO())
    whole = objective.counts(batch)
    first = batch.rows(torch.tensor([0]))
    rest = batch.rows(torch.tensor([1, 2]))
    losses = [
        float(objective.evaluate(part, {LogProb(1.0): Field(own)}, {}, whole).loss.detach())
        for part, own in ((first, lp[:1]), (rest, lp[1:]))
    ]
    assert losses == pytest.approx([-1 * (1 / 3), -(6 + 4) / 4 * (2 / 3)])


def test_asymmetric_and_dual_clip_by_hand() -> None:
    """ε_high = 0.6 does not clip ρ = 1.5; δ = 3 bounds a negative advantage's ρ = 5 at 3, with slope 0."""
    batch, lp = rows([[1.5], [5.0]], [1, -1])
    loss, grad, _ = run(GRPO(clip=0.2, clip_high=0.6), batch, lp)
    assert loss == pytest.approx((-1.5 + 5) / 2) and grad == pytest.approx([-0.75, 2.5])
    loss, grad, metrics = run(GRPO(clip=0.2, clip_high=0.6, dual_clip=3.0), batch, lp)
    assert loss == pytest.approx((-1.5 + 3) / 2) and grad == pytest.approx([-0.75, 0])
    assert metrics["clip_dual"] == 0.5


def test_the_normalisers_by_hand() -> None:
    """Two rows of 1 and 3 tokens, ρ = 1, A = 1 and 2: token losses -1 | -2 -2 -2, and each one's divisor."""
    batch, lp = rows([[1.0], [1.0, 1.0, 1.0]], [1, 2])
    expected = {
        GRPO(): [-1 / 2, *[-2 / 6] * 3],  # 1/S · 1/|y|
        DAPO(): [-1 / 4, *[-2 / 4] * 3],  # 1/tokens
        DrGRPO(): [-1 / 8, *[-2 / 8] * 3],  # 1/(S·L_max), L_max = 4
        DrGRPO(max_length=10): [-1 / 20, *[-2 / 20] * 3],
        BNPO(): [-1 / 4, *[-2 / 4] * 3],  # in one piece
        GSPO(): [-1 / 2, *[-2 / 6] * 3],
        LUSPO(): [-1 / 2, *[-2 / 2] * 3],  # |y| times GSPO's
        CISPO(): [-1 / 4, *[-2 / 4] * 3],
        SAPO(): [-1 / 2, *[-2 / 6] * 3],
        Reinforce(): [-1 / 4, *[-2 / 4] * 3],
        Reinforce(per="sequence"): [-1 / 2, *[-2 / 6] * 3],
        Reinforce(per="sum"): [-1 / 2, *[-2 / 2] * 3],
        RLOO(): [-1 / 2, *[-2 / 2] * 3],
    }
    for term, slopes in expected.items():
        assert run(term, batch, lp)[1] == pytest.approx(slopes), term


def test_the_sequence_ratio_by_hand() -> None:
    """Ratios 4 and 1 in one row: s = √4 = 2.

    With A = 1 and a clip at 3 the loss is -2 and each token's slope -s·A/|y| = -1.
    """
    batch, lp = rows([[4.0, 1.0]], [1])
    loss, grad, _ = run(GSPO(clip=1.0, clip_high=2.0), batch, lp)
    assert loss == pytest.approx(-2) and grad == pytest.approx([-1, -1])
    assert run(GSPO(clip=1.0, clip_high=0.5), batch, lp)[:2] == (pytest.approx(-1.5), [0, 0])
    assert run(GSPO(clip=1.0, clip_high=2.0, level="token"), batch, lp)[:2] == (
        pytest.approx(-2),
        pytest.approx([-1, -1]),
    )


def test_gspos_token_form_takes_advantages_that_differ_within_a_sequence() -> None:
    batch, lp = rows([[4.0, 1.0]], [1])
    uneven = batch.with_signals(advantages=torch.tensor([1.0, -3.0]))
    assert run(GSPO(clip=1.0, clip_high=2.0, level="token"), uneven, lp)[1] == pytest.approx([-1, 3])
    with pytest.raises(SignalError, match="gspo: level='sequence' takes one advantage"):
        run(GSPO(), uneven, lp)


def test_cispo_by_hand() -> None:
    """-sg[min(ρ, c)]·A·lp: ρ = 8 counts as c = 5, and no token loses its gradient."""
    batch, lp = rows([[8.0], [0.5]], [1, -2], q=-4.0)
    loss, grad, metrics = run(CISPO(max_ratio=5.0), batch, lp)
    assert grad == pytest.approx([-5 / 2, 1 / 2]) and metrics["clip_high"] == 0.5
    assert loss == pytest.approx((-5 * (-4 + math.log(8)) + 1 * (-4 + math.log(0.5))) / 2)


def test_sapo_by_hand() -> None:
    """At ρ = 1: value -(4/τ)·½·A, slope -A for every τ. At ρ = 3, τ = 1: slope -4σ'(2)·3·A, σ'(2) = 0.104994."""
    batch, lp = rows([[1.0], [1.0], [3.0]], [1, -2, 1])
    loss, grad, _ = run(SAPO(), batch, lp)
    assert grad == pytest.approx([-1 / 3, 2 / 3, -4 * 0.10499359 * 3 / 3], rel=1e-6)
    assert loss == pytest.approx((-2 + 4 / 1.05 - 4 * 0.88079708) / 3, rel=1e-6)


def test_rloo_is_the_log_prob_of_the_whole_completion_against_the_others_mean() -> None:
    batch, lp = rows([[1.0], [1.0, 1.0], [1.0]], [0, 0, 0])
    batch = with_advantages(
        batch.with_signals(group=torch.zeros(3, dtype=torch.long)), [1.0, 0.0, 0.5], "leave_one_out"
    )
    loss, grad, metrics = run(RLOO(), batch, lp)
    assert metrics["nll"] == pytest.approx(2.0)
    assert grad == pytest.approx([-0.75 / 3, 0.75 / 3, 0.75 / 3, 0])  # A = 1-.25, 0-.75, .5-.5
    assert loss == pytest.approx((0.75 * 2 - 0.75 * 4) / 3)


# --- truncated importance sampling ----------------------------------------------------------------------------------


def _with_gap(weights: list[list[float]], advantages: list[float]) -> tuple[Batch, Tensor]:
    """ρ to the proximal policy is 1; proximal/behaviour is ``weights``."""
    batch, lp = rows([[1.0] * len(r) for r in weights], advantages)
    flat = torch.tensor([w for r in weights for w in r])
    return batch.with_signals(proximal=torch.full_like(flat, -2.0), behaviour=-2.0 - flat.log()), lp


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (TruncatedIS(cap=2.0), [2.0, 0.5, 2.0]),  # token: 3→2, 0.5, 4→2
        (TruncatedIS(cap=2.0, mode="mask"), [0.0, 0.5, 0.0]),
        (TruncatedIS(cap=3.5, floor=0.8, mode="mask"), [3.0, 0.0, 0.0]),
        (TruncatedIS(cap=5.0, floor=0.8), [3.0, 0.8, 4.0]),
        (TruncatedIS(cap=2.0, level="sequence"), [1.5, 1.5, 2.0]),  # sequence: 3·0.5 = 1.5 | 4→2
        (TruncatedIS(cap=2.0, level="sequence", mode="mask"), [1.5, 1.5, 0.0]),
    ],
)
def test_truncated_importance_by_hand(correction: TruncatedIS, weights: list[float]) -> None:
    """Rows [3, 0.5] and [4], A = 1: each token's slope is its weight over the normaliser."""
    batch, lp = _with_gap([[3.0, 0.5], [4.0]], [1, 1])
    loss, grad, metrics = run(DAPO(correction=correction), batch, lp)
    assert grad == pytest.approx([-w / 3 for w in weights], rel=1e-5)
    assert loss == pytest.approx(-sum(weights) / 3, rel=1e-5)
    assert metrics["is_weight_max"] == pytest.approx(4.0, rel=1e-5)
    if correction.mode == "mask":
        assert metrics["dropped_tokens"] == sum(w == 0 for w in weights)


def test_a_weight_at_a_bound_is_inside() -> None:
    batch, lp = _with_gap([[1.0, 0.5]], [1])
    _, _, metrics = run(DAPO(correction=TruncatedIS(floor=1.0, mode="mask")), batch, lp)
    assert (metrics["dropped_tokens"], metrics["is_cut"]) == (1, 0.5)
    batch, lp = _with_gap([[1.0, 2.0]], [1])
    _, _, metrics = run(DAPO(correction=TruncatedIS(cap=1.0, mode="mask")), batch, lp)
    assert (metrics["dropped_tokens"], metrics["is_cut"]) == (1, 0.5)


def test_where_sampler_and_trainer_agree_the_correction_changes_nothing() -> None:
    batch, policy = full_batch()
    agreed = batch.with_signals(proximal=batch.behaviour)
    for kind in RATIO_KINDS:
        plain, corrected = build(kind), build(kind, correction=TruncatedIS())
        torch.testing.assert_close(policy.gradient(agreed, plain), policy.gradient(agreed, corrected))


def test_the_correction_is_named_in_ran() -> None:
    batch, policy = full_batch()
    ran = policy.evaluate(batch, GRPO(correction=TruncatedIS(level="sequence", mode="mask"))).values["grpo"].ran
    assert ran == "grpo(clip=0.2, over=sequences) × sequence mask importance"


# --- laws -----------------------------------------------------------------------------------------------------------

REINFORCE_TWIN: dict[str, dict[str, object]] = {
    "grpo": {"per": "sequence"},
    "sapo": {"per": "sequence"},
    "gspo": {"per": "sequence"},
    "dapo": {"per": "token"},
    "bnpo": {"per": "token"},
    "cispo": {"per": "token"},
    "luspo": {"per": "sum"},
    "rloo": {"per": "sum"},
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", [*RATIO_KINDS, "rloo"])
def test_on_policy_the_gradient_is_reinforces_with_the_objectives_own_normaliser(kind: str, temperature: float) -> None:
    """LAW.

    It fails on the reviewed bugs: a clamp at ε instead of 1+ε (0.2 × REINFORCE), a ratio that is constantly 1
    (gradient 0), and a sampling temperature that is forgotten when log-probs are recomputed (the ratio would not be 1
    here).
    """
    batch, policy = full_batch(temperature=temperature)
    on_policy = batch.with_signals(behaviour=policy.logprobs(batch, temperature))
    found = policy.gradient(on_policy, OBJECTIVES[kind]())
    if kind == "dr_grpo":
        tokens = on_policy.counts(("rollout",)).tokens
        twin = policy.gradient(on_policy, Reinforce()) * tokens / (5 * 7)
    else:
        twin = policy.gradient(on_policy, Reinforce(**REINFORCE_TWIN[kind]))
    assert found.abs().max() > 1e-3
    torch.testing.assert_close(found, twin, rtol=1e-6, atol=1e-9)
    result = policy.evaluate(on_policy, OBJECTIVES[kind]())
    if kind != "rloo":
        metrics = result.values[kind].metrics
        assert metrics["ratio"].value == pytest.approx(1.0) and metrics["behaviour_kl"].value == pytest.approx(
            0.0, abs=1e-12
        )


def test_grpo_is_not_reinforce_off_policy() -> None:
    """One review found a 'GRPO' that ignored the sampler's log-probs: it was REINFORCE.

    Off-policy the two must differ.
    """
    batch, policy = full_batch()
    a, b = policy.gradient(batch, GRPO()), policy.gradient(batch, Reinforce(per="sequence"))
    assert (a - b).abs().max() > 0.05 * b.abs().max()
    for kind in RATIO_KINDS:
        assert "behaviour" in OBJECTIVES[kind]().signals()
        with pytest.raises(SignalError, match=f"{kind}: needs the signal 'behaviour'"):
            policy.evaluate(batch.with_signals(behaviour=None), OBJECTIVES[kind]())
    policy.evaluate(batch.with_signals(behaviour=None), Reinforce())


@pytest.mark.parametrize("kind", [k for k in RATIO_KINDS if k != "bnpo"])
def test_the_direction_is_right(kind: str) -> None:
    """DR: a small step along minus the gradient raises Σ A·lp, weighted as the objective weighs it on-policy."""
    batch, policy = full_batch()
    on_policy = batch.with_signals(behaviour=policy.logprobs(batch))
    rollouts = on_policy.has_role(("rollout",))[on_policy.row]
    before = policy.logprobs(on_policy)
    grad = policy.gradient(on_policy, OBJECTIVES[kind]())[: policy.hidden.numel()].view_as(policy.hidden)
    with torch.no_grad():
        policy.hidden -= 1e-3 * grad
    change = policy.logprobs(on_policy) - before
    assert on_policy.advantages is not None
    assert float((on_policy.advantages * change)[rollouts].sum()) > 0


def _gradcheck(term: Term, batch: Batch, lp: Tensor) -> bool:
    def loss(x: Tensor) -> Tensor:
        return Objective.of(term).evaluate(batch, {LogProb(): Field(x)}, {}).loss

    return torch.autograd.gradcheck(loss, (lp,), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize(
    "term",
    [
        GRPO(),
        DAPO(dual_clip=1.6),
        DrGRPO(),
        BNPO(),
        GSPO(clip=0.3, clip_high=0.3),
        LUSPO(clip=0.3, clip_high=0.3),
        SAPO(),
    ],
    ids=lambda t: t.kind,
)
def test_gradcheck_on_the_log_probs(term: Term) -> None:
    """FD in float64 for every objective whose value is the integral of its gradient.

    The clips are away from their corners.
    """
    batch, lp = rows([[1.05, 0.6, 1.5], [0.9], [1.7, 0.75]], [1.3, -0.7, -1.1])
    assert _gradcheck(term, batch, lp)


def test_stop_gradient_objectives_declare_the_law() -> None:
    assert all("stop_gradient" in t.laws for t in (CISPO, Reinforce, RLOO))
    assert "batch_local" in BNPO.laws and all("reinforce_on_policy" in OBJECTIVES[k].laws for k in RATIO_KINDS)


@pytest.mark.parametrize(
    "term",
    [GRPO(), DAPO(), GSPO(), GSPO(level="token"), SAPO(), CISPO(), GRPO(dual_clip=3.0)],
    ids=["grpo", "dapo", "gspo", "gspo token", "sapo", "cispo", "dual clip"],
)
@pytest.mark.parametrize("advantage", [1.0, 0.0])
def test_a_ratio_beyond_float32_at_a_clipped_token_has_a_gradient_of_0(term: Term, advantage: float) -> None:
    """exp(200) is infinite in float32; the clip removes the token, so its gradient is 0 and not 0 · ∞ = NaN."""
    batch, lp = rows([[1.0, 1.0]], [advantage], q=-300.0)
    lp = (lp.detach().float() + 200.0).requires_grad_()
    loss, gradient, _ = run(term, batch, lp)
    assert math.isfinite(loss)
    assert all(math.isfinite(g) for g in gradient)
    if not isinstance(term, CISPO):  # CISPO bounds the weight of a token and never removes it
        assert gradient == [0.0, 0.0]


def test_the_dual_clip_removes_an_infinite_ratio_with_a_negative_advantage() -> None:
    batch, lp = rows([[1.0, 1.0]], [-1.0], q=-300.0)
    loss, gradient, _ = run(GRPO(dual_clip=3.0), batch, (lp.detach().float() + 200.0).requires_grad_())
    assert loss == pytest.approx(3.0) and gradient == [0.0, 0.0]


def test_a_loss_that_overflows_is_refused_by_name() -> None:
    """exp overflows: the loss is not finite, and the step is refused with the term's name and its metrics."""
    batch, lp = rows([[1.0], [1.0]], [-1, 1])
    batch = batch.with_signals(behaviour=torch.tensor([-900.0, -2.0]))
    with pytest.raises(ValueError, match=r"grpo: the loss is inf.*ratio_max inf"):
        run(GRPO(), batch, lp)


@given(
    ratios=st.lists(st.lists(st.floats(0.2, 3.0), min_size=1, max_size=4), min_size=1, max_size=4),
    clip=st.floats(0.05, 0.9),
    high=st.floats(0.05, 3.0),
    data=st.data(),
)
def test_the_surrogate_is_a_lower_bound_on_the_unclipped_one(
    ratios: list[list[float]], clip: float, high: float, data: st.DataObject
) -> None:
    """-loss ≤ ρA for every token, with equality inside the clip; a token's slope is -ρA or 0, times the normaliser."""
    advantages = data.draw(st.lists(st.floats(-3, 3), min_size=len(ratios), max_size=len(ratios)))
    batch, lp = rows(ratios, advantages)
    loss, grad, _ = run(DAPO(clip=clip, clip_high=high), batch, lp)
    flat = [r for row in ratios for r in row]
    signs = [a for row, a in zip(ratios, advantages, strict=True) for _ in row]
    n = len(flat)
    assert -loss <= sum(r * a for r, a in zip(flat, signs, strict=True)) / n + 1e-6
    for slope, r, a in zip(grad, flat, signs, strict=True):
        assert min(abs(slope + r * a / n), abs(slope)) < 1e-6 * (1 + abs(a))
        if 1 - clip < r < 1 + high:
            assert slope == pytest.approx(-r * a / n, abs=1e-6)


def test_a_route_without_rollouts_is_idle_with_a_reason() -> None:
    batch, _ = rows([[1.0], [1.0]], [1, 2], correct=torch.tensor([True, True]))
    assert GRPO(route="failed").idle(batch) == "no rollout is failed"
    assert GRPO(route="correct").idle(batch) is None and GRPO().idle(batch) is None


def test_routes_partition_the_rollouts() -> None:
    """SRPO: correct + failed = all, each with its own normaliser; with a sum-normaliser they add up exactly."""
    batch, policy = full_batch()
    parts = [replace(Reinforce(per="sum"), route=r, name=r) for r in ("correct", "failed")]
    counts = [Objective.of(p).counts(batch)[p.label].sequences for p in parts]
    assert counts == [3, 2]
    whole = policy.gradient(batch, Reinforce(per="sum")) * 5
    torch.testing.assert_close(sum(c * policy.gradient(batch, p) for c, p in zip(counts, parts, strict=True)), whole)
