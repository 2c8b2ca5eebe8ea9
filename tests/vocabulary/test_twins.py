"""The fused pass against its eager twin: values, and gradients under weights that are all different."""

from __future__ import annotations

import pytest
import torch

from earnest.engines.vocabulary import fused, sweep
from earnest.objectives.needs import Divergence, Entropy, LogProb, Need, SourceEntropy
from earnest.signals.distributions import FullLogits, Hidden, TopK
from tests.vocabulary.cases import (
    ALL_NEEDS,
    ALPHAS,
    HEADS,
    SOME_NEEDS,
    assert_twins,
    divergences,
    make_batch,
    make_head,
    normal,
    plain_needs,
    source,
    with_sources,
)

V, d, N = 29, 6, 11
AT = [0, 2, 3, 7, 10]


@pytest.fixture(params=[2, 1000], ids=lambda n: f"{n} rows a block")
def block_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sweep, "BLOCK_BYTES", request.param * V * 8)
    return request.param


@pytest.mark.parametrize("need", ALL_NEEDS[: len(plain_needs())] + divergences("teacher"), ids=str)
def test_each_need_alone(need: Need) -> None:
    """Partial coverage, a hidden teacher, chunks of 4, 4 and 3 rows."""
    batch = with_sources(make_batch(N, V), teacher=source("hidden", len(AT), V, d), at=AT)
    fields = assert_twins(normal(1, N, d), make_head(V, d), batch, [need], budget_bytes=4 * V * 8 * 2)
    assert fields[need].ran.endswith("[forward-derivative]")


@pytest.mark.parametrize("kind", HEADS)
def test_every_head(kind: str, block_rows: int) -> None:
    batch = with_sources(
        make_batch(N, V), teacher=source("hidden", len(AT), V, d), reference=source("logits", N, V, d), at=AT
    )
    head = make_head(V, d, **HEADS[kind])  # type: ignore[arg-type]
    for needs in ([LogProb(0.7)], [Entropy()], [Divergence("teacher", 0.3), LogProb()], SOME_NEEDS):
        assert_twins(normal(1, N, d), head, batch, needs, budget_bytes=5 * V * 8 * 3)


@pytest.mark.parametrize("kind", HEADS)
def test_every_head_trained(kind: str, block_rows: int) -> None:
    """The head's own gradient, weight and bias; a teacher with hidden states is the live policy, through a head held
    fixed.
    """
    from dataclasses import replace

    batch = with_sources(
        make_batch(N, V), teacher=source("hidden", len(AT), V, d), reference=source("logits", N, V, d), at=AT
    )
    assert batch.teacher is not None
    batch = batch.with_signals(teacher=replace(batch.teacher, kind="live"))
    head = make_head(V, d, trained=True, **HEADS[kind])  # type: ignore[arg-type]
    for needs in ([LogProb(0.7)], [Entropy(), Divergence("teacher", 0.3)], SOME_NEEDS):
        fields = assert_twins(normal(1, N, d), head, batch, needs, budget_bytes=5 * V * 8 * 3)
        assert all(f.ran.endswith("[recompute]") for f in fields.values())


@pytest.mark.parametrize("teacher", ["hidden", "logits", "topk", "scored"])
@pytest.mark.parametrize("reference", ["hidden", "logits"])
@pytest.mark.parametrize("at", [None, AT, [4], [0, 1, 2, 3]], ids=["all", "some", "one", "front"])
def test_sources_and_coverage(teacher: str, reference: str, at: list[int] | None) -> None:
    M = N if at is None else len(at)
    batch = with_sources(
        make_batch(N, V), teacher=source(teacher, M, V, d), reference=source(reference, N, V, d, seed=6), at=at
    )
    mine = {
        "topk": [Divergence("teacher", a, support="teacher", blend=b) for a in ALPHAS for b in (None, 0.4)]
        + [
            Divergence("teacher", 0.5, support="teacher", top_k=2),
            Divergence("teacher", 1.0, support="teacher", tail="unnormalised"),
            Divergence("teacher", 1.0, support="teacher", tail="unnormalised", blend=0.3),
            Divergence("teacher", 0.5, support="teacher", tail="renormalise", temperature=0.7),
        ],
        "scored": [Divergence("teacher", a, support="student") for a in ALPHAS],
    }.get(teacher, divergences("teacher")[::5])
    needs: list[Need] = [*mine, LogProb(), SourceEntropy("teacher"), Divergence("reference", 1.0)]
    for budget in (4 * V * 8 * 3, fused.BUDGET_BYTES):
        assert_twins(normal(1, N, d), make_head(V, d), batch, needs, budget_bytes=budget)


@pytest.mark.parametrize("rows", [3, 11])
def test_all_needs_at_once_in_chunks(rows: int) -> None:
    batch = with_sources(
        make_batch(N, V), teacher=source("hidden", len(AT), V, d), reference=source("logits", N, V, d), at=AT
    )
    assert_twins(normal(1, N, d), make_head(V, d), batch, ALL_NEEDS, budget_bytes=rows * V * 8 * 3)


# The eager twin rounds the same numbers in another order; 16-bit states bring their own error, the same on both sides.
TOLERANCE = {
    torch.float64: (1e-9, 1e-11),
    torch.float32: (2e-4, 2e-6),
    torch.bfloat16: (2e-2, 1e-4),
    torch.float16: (3e-3, 1e-5),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_dtypes(dtype: torch.dtype, trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from earnest.models import head as models_head

    monkeypatch.setattr(models_head, "SLICE_BYTES", 10 * d * 4)  # a 16-bit head in three uneven slices
    batch = with_sources(make_batch(N, V), teacher=source("logits", len(AT), V, d, dtype=dtype), at=AT)
    head = make_head(V, d, dtype=dtype, bias=True, softcap=6.0, scale=0.9, trained=trained)
    rtol, atol = TOLERANCE[dtype]
    needs: list[Need] = [
        LogProb(),
        Entropy(0.8),
        Divergence("teacher", 0.3),
        Divergence("teacher", 0.5, support="student", top_k=4),
    ]
    fields = assert_twins(
        normal(1, N, d, dtype=dtype), head, batch, needs, budget_bytes=4 * V * 8 * 2, rtol=rtol, atol=atol
    )
    assert all(f.values.dtype == (dtype if dtype == torch.float64 else torch.float32) for f in fields.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits_are_accumulated_in_float32(dtype: torch.dtype) -> None:
    """Against float64 on the same 16-bit numbers: 16-bit logits of about 30 would be off by 0.1 and more."""
    head = make_head(600, 64, dtype=dtype)
    hidden = normal(2, 5, 64, dtype=dtype)
    batch = make_batch(5, 600)
    wide_head = make_head(600, 64)
    with torch.no_grad():
        wide_head.module.weight.copy_(head.weight)
    got = fused.scalars(hidden, head, batch, [LogProb()])[LogProb()].values
    want = fused.scalars(hidden.double(), wide_head, batch, [LogProb()])[LogProb()].values
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("N", [1, 2])
def test_one_token(N: int) -> None:
    batch = with_sources(make_batch(N, V), teacher=source("hidden", N, V, d), reference=source("logits", N, V, d))
    assert_twins(normal(1, N, d), make_head(V, d), batch, ALL_NEEDS)
    assert_twins(normal(1, N, d), make_head(V, d), batch, [LogProb()])


def test_a_teacher_that_covers_nothing_here() -> None:
    """A micro-batch may have no covered row: its field is empty, and nothing else changes."""
    batch = with_sources(make_batch(N, V), teacher=Hidden(normal(5, 0, d)), at=[])
    fields = assert_twins(
        normal(1, N, d), make_head(V, d), batch, [Divergence("teacher"), LogProb(), SourceEntropy("teacher")]
    )
    assert fields[Divergence("teacher")].values.shape == (0,)


@pytest.mark.parametrize("trained", [False, True])
def test_k_targets_per_position(trained: bool) -> None:
    """[N, K] targets: K log-probs a token, each with its own weight; some tokens repeat a target."""
    from earnest.signals.batch import Batch

    R, T, K = 2, 5, 3
    targets = torch.randint(V, (R, T, K), generator=torch.Generator().manual_seed(0))
    targets[0, 0, 1] = targets[0, 0, 0]
    weight = torch.rand(R, T, K, generator=torch.Generator().manual_seed(1))
    weight[1, 2] = 0
    batch = Batch(
        inputs=torch.zeros(R, T, dtype=torch.long),
        targets=targets,
        weight=weight,
        length=torch.tensor([T, T]),
        role=("rollout", "rollout"),
        group=torch.tensor([0, 1]),
        pair=torch.tensor([-1, -1]),
        policy_version=torch.tensor([0, 0]),
    )
    n = R * T - 1
    batch = with_sources(
        batch, teacher=source("hidden", 3, V, d) if not trained else source("logits", 3, V, d), at=[0, 5, 8]
    )
    head = make_head(V, d, bias=True, trained=trained)
    fields = assert_twins(
        normal(1, n, d),
        head,
        batch,
        [LogProb(), LogProb(0.5), Entropy(), Divergence("teacher")],
        budget_bytes=4 * V * 8 * 3,
    )
    assert fields[LogProb()].values.shape == (n, K)
    assert fields[LogProb()].ran == "logprob [recompute]"


def test_confident_logits() -> None:
    """Margins of hundreds of nats, where a naive probability is 0 or 1: finite, and the float64 answer."""
    hidden, head = normal(1, N, d, size=60), make_head(V, d)
    batch = with_sources(make_batch(N, V), teacher=Hidden(normal(5, N, d, size=60)))
    needs: list[Need] = [LogProb(), Entropy(), *(Divergence("teacher", a) for a in ALPHAS)]
    needs += [Divergence("teacher", a, support="student", top_k=2) for a in ALPHAS]
    wide = assert_twins(hidden, head, batch, needs, rtol=1e-7)
    narrow_head = make_head(V, d, dtype=torch.float32)
    narrow_batch = with_sources(make_batch(N, V), teacher=Hidden(normal(5, N, d, size=60, dtype=torch.float32)))
    narrow = assert_twins(hidden.float(), narrow_head, narrow_batch, needs, rtol=1e-3, atol=1e-3)
    for need in needs:
        torch.testing.assert_close(narrow[need].values.double(), wide[need].values, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_identical_policies_cost_exactly_nothing(dtype: torch.dtype) -> None:
    """The same hidden states on both sides: value 0 and gradient 0, to the bit, whatever the chunks."""
    hidden = normal(1, N, d, dtype=dtype, size=3).requires_grad_()
    head = make_head(V, d, dtype=dtype, softcap=20.0)
    batch = with_sources(
        make_batch(N, V), teacher=Hidden(hidden.detach().clone()), reference=Hidden(hidden.detach().clone())
    )
    for needs in (
        [*divergences("teacher"), Divergence("reference", 1.0)],
        [Divergence("teacher", 0.3)],
        [Divergence("reference", 1.0)],
    ):
        fields = fused.scalars(hidden, head, batch, needs, budget_bytes=4 * V * 8 * 3)
        values = torch.stack([f.values for f in fields.values()])
        (grad,) = torch.autograd.grad(values, hidden, torch.rand_like(values))
        assert values.eq(0).all(), [n for n, f in fields.items() if f.values.ne(0).any()]
        assert grad.eq(0).all(), grad.abs().max()


def test_a_received_top_k_of_oneself_costs_nothing_to_rounding() -> None:
    hidden = normal(1, N, d).requires_grad_()
    head = make_head(V, d)
    z = head.logits(hidden.detach())
    logp = z.log_softmax(-1)
    ids = z.topk(4, -1).indices
    top = TopK(ids, logp.gather(-1, ids), logp.scatter(-1, ids, -torch.inf).logsumexp(-1))
    batch = with_sources(make_batch(N, V), teacher=top)
    for alpha in ALPHAS:
        need = Divergence("teacher", alpha, support="teacher")
        values = fused.scalars(hidden, head, batch, [need])[need].values
        (grad,) = torch.autograd.grad(values.sum(), hidden)
        assert float(values.detach().abs().max()) < 1e-14 and float(grad.abs().max()) < 1e-13


def test_finite_differences_of_the_shipped_pass() -> None:
    """The fused gradient is the derivative of the fused value: no twin involved."""
    width = 3
    head = make_head(V, width, bias=True, softcap=7.0, scale=0.8)
    batch = with_sources(
        make_batch(3, V), teacher=source("hidden", 2, V, width), reference=source("logits", 3, V, width), at=[0, 2]
    )
    # Without a blend: a blended source holds the student fixed, so its value has another finite difference on purpose.
    needs = [
        n
        for n in SOME_NEEDS
        if not isinstance(n, SourceEntropy) and not (isinstance(n, Divergence) and n.blend is not None)
    ]

    def f(h: torch.Tensor, *only: Need) -> tuple[torch.Tensor, ...]:
        fields = fused.scalars(h, head, batch, only or needs, budget_bytes=2 * V * 8 * 3)
        return tuple(field.values for field in fields.values())

    hidden = normal(1, 3, width).requires_grad_()
    assert torch.autograd.gradcheck(f, (hidden,), atol=1e-6)
    for need in (LogProb(0.7), Divergence("teacher", 0.3), Divergence("reference", 0.3, support="student", top_k=4)):
        assert torch.autograd.gradcheck(lambda h, need=need: f(h, need), (hidden,), atol=1e-6)


def test_full_logits_of_another_dtype() -> None:
    batch = with_sources(make_batch(N, V), teacher=FullLogits(normal(5, N, V, dtype=torch.bfloat16)))
    assert_twins(
        normal(1, N, d, dtype=torch.float32),
        make_head(V, d, dtype=torch.float32),
        batch,
        [Divergence("teacher")],
        rtol=1e-4,
        atol=1e-6,
    )
