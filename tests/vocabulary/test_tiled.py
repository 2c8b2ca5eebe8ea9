"""Log-probs by tiles of the vocabulary against the slow twin: many tiles, ragged ends, a maximum that moves."""

from __future__ import annotations

import pytest
import torch

from earnest.engines.vocabulary import eager, fused, tiled
from earnest.engines.vocabulary.product import PlainHead
from earnest.objectives.needs import Entropy, LogProb
from tests.vocabulary.cases import HEADS, make_batch, make_head, normal

V, d, N = 211, 6, 37  # neither is a multiple of a tile


@pytest.fixture(params=[(1, 7), (5, 13), (2048, 64)], ids=["rows of 1", "rows of 5", "all rows"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = request.param
    monkeypatch.setattr(tiled, "ROWS", rows)
    monkeypatch.setattr(tiled, "LEAST_COLUMNS", columns)
    monkeypatch.setattr(tiled, "TILE_BYTES", 1)  # always the least columns


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", HEADS)
def test_many_tiles_are_the_whole(kind: str, temperature: float) -> None:
    head = make_head(V, d, **HEADS[kind])  # type: ignore[arg-type]
    batch, need = make_batch(N, V), LogProb(temperature)
    weights = normal(3, N)
    found = {}
    for module in (fused, eager):
        hidden = normal(1, N, d).requires_grad_()
        field = module.scalars(hidden, head, batch, [need])[need]
        (field.values * weights).sum().backward()
        found[module] = field.values.detach(), hidden.grad
    for mine, twin in zip(found[fused], found[eager], strict=True):
        torch.testing.assert_close(mine, twin, rtol=1e-11, atol=1e-11)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_and_rows_agree(dtype: torch.dtype) -> None:
    """The sweep by rows is the other fused path: asking for an entropy beside the log-prob takes it."""
    head, batch = make_head(V, d, dtype=dtype), make_batch(N, V)
    hidden = normal(1, N, d, dtype=dtype)
    alone = fused.scalars(hidden, head, batch, [LogProb()])[LogProb()].values
    beside = fused.scalars(hidden, head, batch, [LogProb(), Entropy()])[LogProb()].values
    torch.testing.assert_close(alone, beside, rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("falling", [False, True])
def test_a_maximum_that_moves_through_the_tiles(falling: bool) -> None:
    """Logits that rise by 900 over the vocabulary overflow without the running maximum; -inf forbids tokens."""
    head = make_head(V, d, bias=True)
    assert head.bias is not None
    with torch.no_grad():
        slope = torch.linspace(0, 900, V, dtype=torch.float64)
        head.bias.copy_(slope.flip(0) if falling else slope)
        head.bias[:20] = float("-inf")
    batch = make_batch(N, V - 20)
    targets = batch.token_target + 20
    hidden = normal(1, N, d)
    values, by_hidden = tiled.logprobs(
        hidden, PlainHead(head, torch.float64), targets[:, None], 1.0, slope=True, budget_bytes=2**20
    )
    states = hidden.clone().requires_grad_()
    twin = head.logits(states).log_softmax(-1).gather(-1, targets[:, None])
    twin.sum().backward()
    torch.testing.assert_close(values, twin.detach(), rtol=1e-11, atol=1e-9)
    torch.testing.assert_close(by_hidden, states.grad, rtol=1e-9, atol=1e-9)
    assert torch.isfinite(values).all()


def test_the_budget_bounds_the_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = PlainHead.tile

    def tile(self: PlainHead, states, part, weight, out):  # type: ignore[no-untyped-def]
        seen.append(out.numel() * out.element_size())
        plain(self, states, part, weight, out)

    monkeypatch.setattr(PlainHead, "tile", tile)
    head, batch = make_head(V, d), make_batch(N, V)
    fused.scalars(normal(1, N, d), head, batch, [LogProb()], budget_bytes=8 * 64 * 10)
    assert max(seen) <= 8 * 64 * 10 and len(seen) > 4


def test_rows_are_cut_into_parts_of_nearly_equal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few parts as possible, and the last one is not a small rest."""
    monkeypatch.setattr(tiled, "ROWS", 10)
    head = PlainHead(make_head(V, d), torch.float64)
    sizes = [tiled.sizes(normal(1, n, d), head, 2**20)[0] for n in (0, 1, 10, 11, 21, 37)]
    assert sizes == [1, 1, 10, 6, 7, 10]
