"""Laws that every term obeys, over drawn batches: ragged lengths, one-token completions, holes, weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from earnest.objectives import GRPO, SDPO, SFT, KLBarrier, Objective, Reinforce, SimPO
from earnest.objectives.metrics import Max, Mean, Metric, Sum, merge
from earnest.objectives.view import Field
from earnest.signals import Batch, FullLogits, Reference, Teacher
from tests.objectives.support import D, Policy, V, examples, full_batch

TERMS = examples()
# Every example is all terms at once: a fifth of the profile's number, so that nightly draws more of them too.
FEW = settings(max_examples=max(8, settings().max_examples // 5))


@st.composite
def batches(draw: st.DrawFn) -> tuple[Batch, Policy]:
    """Legal batches of every role: log-probs at most 0, masked tokens, uneven weights, a teacher for some rows."""
    seed = draw(st.integers(0, 2**16))
    g = torch.Generator().manual_seed(seed)
    groups = draw(st.lists(st.integers(2, 3), min_size=1, max_size=2))
    pairs = draw(st.integers(1, 2))
    demos = draw(st.integers(1, 2))
    role = ["rollout"] * sum(groups) + ["chosen", "rejected"] * pairs + ["demonstration"] * demos
    group = [i for i, n in enumerate(groups) for _ in range(n)]
    group += list(range(len(groups), len(groups) + len(role) - len(group)))
    pair = [-1] * sum(groups) + [p for p in range(pairs) for _ in range(2)] + [-1] * demos
    lengths = draw(st.lists(st.integers(1, 5), min_size=len(role), max_size=len(role)))
    completions = [torch.randint(0, V, (n,), generator=g).tolist() for n in lengths]
    batch = Batch.from_rows([[1, 2]] * len(role), completions, role=role, group=group, pair=pair, max_length=6)  # type: ignore[arg-type]
    weight = batch.weight * torch.where(torch.rand(batch.weight.shape, generator=g) < 0.3, 0.5, 1.0)
    for r, n in enumerate(lengths):
        if n > 2:  # a hole that does not empty the row
            weight[r, 2] = 0.0
    batch = batch.with_signals(weight=weight)
    policy = Policy(batch, seed)
    N = batch.active.shape[0]
    near = lambda: (policy.logprobs(batch) + 0.3 * torch.randn(N, generator=g).double()).clamp(max=0)  # noqa: E731
    some = torch.rand(len(role), generator=g) < 0.7
    some[0] = True
    at = (some & batch.has_role(("rollout",)))[batch.row].nonzero()[:, 0]
    logits = lambda n: torch.randn(n, V, generator=g).double()  # noqa: E731
    correct = torch.rand(len(role), generator=g) < 0.5
    batch = batch.with_signals(
        advantages=batch.per_token(torch.randn(len(role), generator=g)),
        behaviour=near(),
        proximal=near(),
        reference=Reference(near(), FullLogits(logits(N))),
        teacher=Teacher(FullLogits(logits(len(at))), at),
        correct=correct,
        kl_baseline=torch.full((len(role),), 0.3),
    )
    return batch, policy


def permuted(batch: Batch, order: list[int]) -> tuple[Batch, Tensor]:
    return batch.rows(order), torch.cat([(batch.row == r).nonzero()[:, 0] for r in order])


def split_gradient(
    batch: Batch, policy: Policy, objective: Objective, parts: list[list[int]]
) -> tuple[Tensor, dict[str, Any]]:
    """The two paths of the engine: additive objectives part by part, others on the whole batch's scalars."""
    state = objective.initial_state()
    needs = objective.needs(batch, state)
    if not objective.additive:
        result = objective.evaluate(batch, policy.scalars(batch, needs), state)
        return policy.gradient(batch, objective), {k: v.metrics for k, v in result.values.items()}
    counts = objective.counts(batch)
    total = torch.zeros(policy.hidden.numel() + policy.sigma.numel(), dtype=torch.float64)
    found: list[dict[str, Metric]] = []
    for rows in parts:
        part, index = permuted(batch, rows)
        result = objective.evaluate(part, policy.scalars(part, needs, index), state, counts)
        grads = torch.autograd.grad(result.loss, [policy.hidden, policy.sigma], allow_unused=True)
        total += torch.cat(
            [
                (torch.zeros_like(p) if x is None else x).flatten()
                for p, x in zip((policy.hidden, policy.sigma), grads, strict=True)
            ]
        )
        found += [dict(v.metrics) for v in result.values.values()]
    return total, {next(iter(objective.terms)).term.label: merge(found)}


@FEW
@given(batches(), st.randoms(use_true_random=False))
def test_an_uneven_split_gives_the_whole_batchs_gradient_and_metrics(drawn: tuple[Batch, Policy], random: Any) -> None:
    """SE and MR, for every term.

    An even split would hide a mean of means; bnpo is batch-local by definition and exempt.
    """
    batch, policy = drawn
    order = list(range(len(batch)))
    random.shuffle(order)
    cut = random.randint(1, len(order) - 1)
    for kind, term in TERMS.items():
        objective = Objective.of(term)
        if "batch_local" in term.laws:
            continue
        whole = policy.evaluate(batch, objective)
        split, metrics = split_gradient(batch, policy, objective, [order[:cut], order[cut:]])
        torch.testing.assert_close(
            split, policy.gradient(batch, objective), rtol=1e-7, atol=1e-10, msg=lambda m, kind=kind: f"{kind}: {m}"
        )
        for name, metric in whole.values[kind].metrics.items():
            assert metrics[kind][name].value == pytest.approx(metric.value, rel=1e-5, abs=1e-7), (kind, name)


def test_bnpo_does_depend_on_the_split() -> None:
    """The declaration is true; otherwise its exemption from the law would hide a defect."""
    batch, policy = full_batch()
    objective = Objective.of(TERMS["bnpo"])
    split, _ = split_gradient(batch, policy, objective, [[0, 1], [2, 3, 4, 5, 6, 7, 8, 9, 10]])
    assert (split - policy.gradient(batch, objective)).abs().max() > 1e-3


@FEW
@given(batches(), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(drawn: tuple[Batch, Policy], random: Any) -> None:
    batch, policy = drawn
    order = list(range(len(batch)))
    random.shuffle(order)
    other, index = permuted(batch, order)
    for kind, term in TERMS.items():
        objective = Objective.of(term)
        state = objective.initial_state()
        a = policy.evaluate(batch, objective).loss
        b = objective.evaluate(other, policy.scalars(other, objective.needs(other, state), index), state).loss
        torch.testing.assert_close(a, b, msg=lambda m, kind=kind: f"{kind}: {m}")


@FEW
@given(batches())
def test_masked_tokens_and_padding_do_not_matter(drawn: tuple[Batch, Policy]) -> None:
    """MI: other token ids where the weight is 0 (holes, padding), and more padding, do not change loss and gradient."""
    batch, policy = drawn
    off = batch.weight == 0
    noisy = batch.with_signals(targets=torch.where(off, (batch.targets + 3) % V, batch.targets))
    wider = {n: torch.nn.functional.pad(getattr(batch, n), (0, 3)) for n in ("inputs", "targets", "weight")}
    padded = replace(batch, **wider)
    for kind, term in TERMS.items():
        wanted = policy.gradient(batch, term)
        for other in (noisy, padded):
            torch.testing.assert_close(policy.gradient(other, term), wanted, msg=lambda m, kind=kind: f"{kind}: {m}")


@FEW
@given(batches())
def test_every_token_that_a_term_reads_matters(drawn: tuple[Batch, Policy]) -> None:
    """CV: each token of its roles has a gradient, also end-of-sequence tokens and one-token completions.

    No other token has one.
    """
    batch, policy = drawn
    selective = {"kl_barrier", "spectral_cap", "entropy_aware"}  # an aggregate, a norm, a choice of tokens
    wide = {k: replace(t, clip=1.0, clip_high=50.0) if hasattr(t, "clip") else t for k, t in TERMS.items()}
    assert batch.advantages is not None
    for kind, term in wide.items():
        grad = policy.gradient(batch, term)[: policy.hidden.numel()].view_as(policy.hidden)
        reached = grad.abs().sum(-1) > 0
        reads = term.tokens(batch)
        assert not bool((reached & ~reads).any()), kind
        if kind not in selective:
            assert bool(reached[reads].all()), kind


@FEW
@given(batches())
def test_a_duplicated_batch_has_the_same_loss(drawn: tuple[Batch, Policy]) -> None:
    """Every normaliser is a mean over something: twice the same rows change nothing (a sum would double)."""
    batch, policy = drawn
    n = len(batch)
    twice, index = permuted(batch, [*range(n), *range(n)])
    pair = torch.where(twice.pair >= 0, twice.pair + 100 * (torch.arange(2 * n) >= n), twice.pair)
    twice = twice.with_signals(pair=pair, group=twice.group + 100 * (torch.arange(2 * n) >= n))
    for kind, term in TERMS.items():
        objective = Objective.of(replace(term, over="rmse") if kind == "kl_barrier" else term)
        state = objective.initial_state()
        b = objective.evaluate(twice, policy.scalars(twice, objective.needs(twice, state), index), state).loss
        torch.testing.assert_close(policy.evaluate(batch, objective).loss, b, msg=lambda m, kind=kind: f"{kind}: {m}")


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_scaling_all_token_weights_changes_nothing(weight: float) -> None:
    """Weights are relative: the mean divides by their sum.

    (Sums over a sequence, as in DPO, KTO, LUSPO and RLOO, do scale: they use Σ w·lp.)
    """
    batch, policy = full_batch()
    scaled = batch.with_signals(weight=batch.weight * weight)
    sums = {"dpo", "kto", "luspo", "rloo", "dr_grpo"}
    for kind, term in TERMS.items():
        a, b = policy.gradient(batch, term), policy.gradient(scaled, term)
        if kind in sums:
            assert (a - b).abs().max() > 1e-6, kind
        else:
            torch.testing.assert_close(a, b, msg=lambda m, kind=kind: f"{kind}: {m}")


def test_weights_that_sum_to_zero_are_refused_by_name() -> None:
    batch, policy = full_batch(holes=False)
    weight = torch.where(batch.has_role(("demonstration",))[:, None], -batch.weight, batch.weight)
    with pytest.raises(ValueError, match=r"sft: the weights of its .* sum to -4"):
        policy.evaluate(batch.with_signals(weight=weight), SFT())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", sorted(TERMS))
def test_low_precision_scalars_are_summed_in_float32(kind: str, dtype: torch.dtype) -> None:
    """F64: scalars rounded to 16 bits give the loss of the same rounded scalars in float64."""
    batch, policy = full_batch()
    objective = Objective.of(TERMS[kind])
    state = objective.initial_state()
    found = policy.scalars(batch, objective.needs(batch, state))
    rounded = {n: replace(f, values=f.values.detach().to(dtype)) for n, f in found.items()}
    exact = {n: replace(f, values=f.values.double()) for n, f in rounded.items()}
    low = objective.evaluate(batch, rounded, state).loss
    assert low.dtype in (torch.float32, torch.float64)
    assert float(low) == pytest.approx(float(objective.evaluate(batch, exact, state).loss), rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("kind", sorted(TERMS))
def test_laws_that_a_term_declares_are_known_ones(kind: str) -> None:
    known = {"stop_gradient", "batch_local", "reinforce_on_policy", "zero_at_source", "inactive_at_source"}
    assert TERMS[kind].laws <= known


def test_terms_declared_inactive_at_the_source_are_inactive_only_there() -> None:
    batch, policy = full_batch()
    assert batch.reference is not None
    from earnest.signals import Hidden

    home = batch.with_signals(reference=Reference(policy.logprobs(batch), Hidden(policy.hidden.detach())))
    for kind in ("reference_kl", "kl_barrier"):
        term = replace(TERMS[kind], tau=0.0) if kind == "kl_barrier" else TERMS[kind]
        assert "inactive_at_source" in term.laws
        assert policy.gradient(home, term).abs().max() < 1e-12 < policy.gradient(batch, term).abs().max()


def test_a_sum_is_linear_in_its_weights_and_has_every_parts_metrics() -> None:
    batch, policy = full_batch()
    total: Objective = 0.3 * (GRPO() + 2.0 * SFT()) + SDPO(top_k=4) * 0.5 + (SimPO() + KLBarrier(tau=0.01)) * 2
    assert [w.weight for w in total.terms] == [0.3, 0.6, 0.5, 2.0, 2.0]
    expected = sum(w.weight * policy.gradient(batch, w.term) for w in total.terms)
    torch.testing.assert_close(policy.gradient(batch, total), expected)
    assert set(policy.evaluate(batch, total).values) == {"grpo", "sft", "sdpo", "simpo", "kl_barrier"}


def test_what_is_not_a_term_is_not_added() -> None:
    with pytest.raises(TypeError):
        GRPO() + 1  # type: ignore[operator]


def test_needs_are_shared_between_terms() -> None:
    batch, _ = full_batch()
    objective = GRPO() + Reinforce() + SDPO(top_k=4) + SFT()
    assert len(objective.needs(batch, objective.initial_state())) == 2  # one log-prob, one divergence


def test_metrics_of_parts_merge_to_those_of_the_whole() -> None:
    parts: list[dict[str, Metric]] = [
        {"m": Mean(3.0, 1.0), "s": Sum(2.0), "x": Max(1.0)},
        {"m": Mean(1.0, 3.0), "s": Sum(5.0), "x": Max(4.0), "only": Sum(1.0)},
    ]
    assert {k: v.value for k, v in merge(parts).items()} == {"m": 1.0, "s": 7.0, "x": 4.0, "only": 1.0}  # type: ignore[arg-type]


def test_sft_counts_every_supervised_token_once_also_with_several_targets() -> None:
    """-Σ w·lp / Σ w over [n, K] targets equals the same tokens as single targets."""
    batch = Batch.from_rows([[1]], [[2, 3]], role="demonstration")
    wide = replace(batch, targets=torch.tensor([[[2, 4], [3, 5]]]), weight=torch.tensor([[[1.0, 0.5], [1.0, 0.0]]]))
    from earnest.objectives.needs import LogProb

    lp = torch.tensor([[-1.0, -2.0], [-3.0, -9.0]], dtype=torch.float64, requires_grad=True)
    loss = Objective.of(SFT()).evaluate(wide, {LogProb(): Field(lp)}, {}).loss
    assert float(loss.detach()) == pytest.approx((1 + 1 + 3) / 2.5)
    assert torch.autograd.grad(loss, lp)[0].tolist() == [[-1 / 2.5, -0.5 / 2.5], [-1 / 2.5, 0]]


def test_the_terminal_token_is_supervised_also_when_it_is_the_padding_token() -> None:
    """CV: pad == eos == 0; the last token of the short row has a gradient, the padding after it has none."""
    batch = Batch.from_rows([[5], [5]], [[3, 0], [1, 2, 4, 0]], role="demonstration", pad=0)
    policy = Policy(batch)
    grad = policy.gradient(batch, SFT())[: policy.hidden.numel()].view(-1, D)
    assert batch.active.shape[0] == 6 and bool((grad.abs().sum(-1) > 0).all())
