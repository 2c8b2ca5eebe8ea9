"""Top-K divergences by tiles against the slow twin: many tiles, ragged ends, supports that move, tails that vanish."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from earnest.engines.vocabulary import eager, fused, tiled, tiled_support
from earnest.engines.vocabulary.product import PlainHead
from earnest.models.head import HeadSpec
from earnest.objectives.needs import Divergence, Entropy
from earnest.signals.batch import Batch, Teacher
from earnest.signals.distributions import Hidden, TopK
from tests.vocabulary.cases import HEADS, make_batch, make_head, normal

V, d, N = 211, 6, 37  # neither is a multiple of a tile


@pytest.fixture(params=[(5, 13), (2048, 64)], ids=["rows of 5", "all rows"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = request.param
    monkeypatch.setattr(tiled, "ROWS", rows)
    monkeypatch.setattr(tiled, "LEAST_COLUMNS", columns)
    monkeypatch.setattr(tiled, "TILE_BYTES", 1)  # always the least columns
    monkeypatch.setattr(tiled_support, "GATHER_BYTES", 3 * 9 * d * 8)


def both(head: HeadSpec, batch: Batch, need: Divergence, hidden: Tensor) -> list[tuple[Tensor, Tensor, str]]:
    found = []
    weights = normal(3, hidden.shape[0]).to(hidden.dtype)
    for module in (fused, eager):
        states = hidden.clone().requires_grad_()
        field = module.scalars(states, head, batch, [need])[need]
        at = slice(None) if field.at is None else field.at
        (field.values * weights[at]).sum().backward()
        assert states.grad is not None
        found.append((field.values.detach(), states.grad, field.ran.rsplit(" [", 1)[0]))
    return found


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[Divergence]:
    """What went by tiles: a test that compares the sweep with itself proves nothing."""
    seen: list[Divergence] = []
    plain = tiled_support.divergence

    def divergence(hidden, source, head, need, **how):  # type: ignore[no-untyped-def]
        seen.append(need)
        assert how["slope"] is True and how["budget_bytes"] >= 2**20, "the gradient is asked for, with the whole budget"
        return plain(hidden, source, head, need, **how)

    monkeypatch.setattr(tiled_support, "divergence", divergence)
    return seen


NEEDS = [
    Divergence("teacher", alpha, support=support, top_k=9, tail=tail, temperature=tau)  # type: ignore[arg-type]
    for alpha, tail in ((0.1, "bucket"), (0.5, "bucket"), (1.0, "bucket"), (0.5, "renormalise"), (1.0, "unnormalised"))
    for support, tau in (("student", 1.0), ("teacher", 0.6))
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("need", NEEDS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "all"])
def test_many_tiles_are_the_whole(kind: str, need: Divergence, ways: list[Divergence]) -> None:
    head = make_head(V, d, **HEADS[kind])  # type: ignore[arg-type]
    at = torch.arange(0, N, 2)
    states = normal(1, N, d)
    teacher = Hidden((states + normal(2, N, d, size=0.5))[at])
    batch = make_batch(N, V).with_signals(teacher=Teacher(teacher, at))
    mine, twin = both(head, batch, need, states)
    assert ways == [need]
    torch.testing.assert_close(mine[0], twin[0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(mine[1], twin[1], rtol=1e-10, atol=1e-11)
    assert mine[2] == twin[2]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("k", [None, 4])
def test_a_received_top_k(k: int | None, ways: list[Divergence]) -> None:
    head, states = make_head(V, d, softcap=6.0), normal(1, N, d)
    logp = head.logits(states + normal(2, N, d, size=0.5)).detach().log_softmax(-1)
    top = logp.topk(9, sorted=False)
    rest = logp.scatter(1, top.indices, float("-inf")).logsumexp(1)
    batch = make_batch(N, V).with_signals(teacher=Teacher(TopK(top.indices, top.values, rest)))
    need = Divergence("teacher", 0.5, support="teacher", top_k=k or 9)
    mine, twin = both(head, batch, need, states)
    assert ways == [need]
    for a, b in zip(mine[:2], twin[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("support", ["student", "teacher"])
def test_tiles_and_rows_agree(support: str, dtype: torch.dtype, ways: list[Divergence]) -> None:
    """The sweep by rows is the other fused path: asking for an entropy beside the divergence takes it."""
    head, states = make_head(V, d, dtype=dtype), normal(1, N, d, dtype=dtype)
    teacher = Hidden(states + normal(2, N, d, dtype=dtype, size=0.5))
    batch = make_batch(N, V).with_signals(teacher=Teacher(teacher))
    need = Divergence("teacher", 0.5, support=support, top_k=9)  # type: ignore[arg-type]
    found = []
    for needs in ([need], [need, Entropy()]):
        h = states.clone().requires_grad_()
        field = fused.scalars(h, head, batch, needs)[need]
        (field.values * torch.arange(N)).sum().backward()
        found.append((field.values.detach(), h.grad))
    assert ways == [need]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-4, atol=5e-5)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("need", NEEDS, ids=str)
@pytest.mark.parametrize("falling", [False, True])
def test_a_support_that_moves_and_a_tail_that_vanishes(falling: bool, need: Divergence) -> None:
    """Logits that rise by 900 over the vocabulary: every tile beats all before it, and the tail is e^-30 at most."""
    head = make_head(V, d, bias=True)
    assert head.bias is not None
    with torch.no_grad():
        rise = torch.linspace(0, 900, V, dtype=torch.float64)
        head.bias.copy_(rise.flip(0) if falling else rise)
    states = normal(1, N, d)
    batch = make_batch(N, V).with_signals(teacher=Teacher(Hidden(states + normal(2, N, d, size=0.5))))
    mine, twin = both(head, batch, need, states)
    for a, b in zip(mine[:2], twin[:2], strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("gap", [10.0, 40.0, 120.0, 300.0])
def test_a_thin_tail_of_one_side_in_float32(gap: float, alpha: float) -> None:
    """One side is sure of few tokens, the other is not: the tail's slope is a difference here, and must not cancel."""
    head = make_head(V, d, bias=True, dtype=torch.float32)
    assert head.bias is not None
    states = normal(1, N, d, dtype=torch.float32)
    with torch.no_grad():
        head.weight[:, 0] = 0
        head.weight[:9, 0] = 1
    sure, unsure = states.clone(), states.clone()
    sure[:, 0], unsure[:, 0] = gap, -1.0
    need = Divergence("teacher", alpha, support="student", top_k=9)
    for own, other in ((sure, unsure), (unsure, sure)):
        batch = make_batch(N, V).with_signals(teacher=Teacher(Hidden(other)))
        mine, twin = both(head, batch, need, own)
        for a, b in zip(mine[:2], twin[:2], strict=True):
            rounded = 16 * torch.finfo(torch.float32).eps * float(b.abs().max())  # of slopes up to ``gap``
            torch.testing.assert_close(a, b, rtol=2e-4, atol=max(2e-4, rounded))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("need", NEEDS, ids=str)
def test_the_same_states_cost_exactly_nothing(need: Divergence, dtype: torch.dtype, ways: list[Divergence]) -> None:
    head, states = make_head(V, d, dtype=dtype), normal(1, N, d, dtype=dtype)
    other = states.clone()
    other[::2] += 1  # in the same tile as rows that differ
    batch = make_batch(N, V).with_signals(teacher=Teacher(Hidden(other)))
    hidden = states.clone().requires_grad_()
    field = fused.scalars(hidden, head, batch, [need])[need]
    field.values.sum().backward()
    assert hidden.grad is not None and ways == [need]
    assert (field.values[1::2] == 0).all() and (hidden.grad[1::2] == 0).all()
    assert (field.values[::2] > 0).all() and (hidden.grad[::2] != 0).any(1).all()


def test_what_goes_by_rows(ways: list[Divergence]) -> None:
    head, states = make_head(V, d), normal(1, N, d)
    batch = make_batch(N, V).with_signals(teacher=Teacher(Hidden(normal(2, N, d))))
    for need in (
        Divergence("teacher", 0.0, support="student", top_k=9),
        Divergence("teacher", 0.5, support="student", top_k=9, blend=0.3),
        Divergence("teacher", 0.5),
        Divergence("teacher", 0.5, support="student", top_k=V),
    ):
        mine, twin = both(head, batch, need, states)
        torch.testing.assert_close(mine[1], twin[1], rtol=1e-10, atol=1e-11)
    assert not ways


@pytest.mark.parametrize("need", NEEDS, ids=str)
def test_a_teacher_of_no_row_costs_nothing_and_ran_is_set(need: Divergence, ways: list[Divergence]) -> None:
    """A micro-batch may have none of the taught rows."""
    nobody = torch.zeros(0, dtype=torch.long)
    batch = make_batch(N, V).with_signals(teacher=Teacher(Hidden(normal(2, 0, d)), nobody))
    mine, twin = both(make_head(V, d), batch, need, normal(1, N, d))
    assert ways == [need] and mine[0].shape == (0,) and (mine[1] == 0).all() and mine[2] == twin[2]


def test_fewer_possible_tokens_than_k() -> None:
    """-inf forbids tokens: the support is filled with impossible ones, each once."""
    head = make_head(V, d, bias=True)
    assert head.bias is not None
    with torch.no_grad():
        head.bias[5:] = float("-inf")
    side = tiled_support._chosen(normal(1, N, d), tiled.Tiles(PlainHead(head, torch.float64), 13, 1.0), 9, pulls=False)
    assert all(len(set(row)) == 9 and {0, 1, 2, 3, 4} <= set(row) for row in side.ids.tolist())
    assert (side.rest == 0).all()
