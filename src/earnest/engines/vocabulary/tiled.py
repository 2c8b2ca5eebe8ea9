"""Log-probs alone, by tiles of the vocabulary: every row at once, a few columns at a time, the head read once.

    m ← max(m, max_v z_v)    s ← s·e^(m_old - m) + Σ_v e^(z_v - m)    a ← a·e^(m_old - m) + Σ_v e^(z_v - m)·z'_v·W_v
    log p(y) = z_y - m - log s                     ∂log p(y)/∂h = z'_y·W_y - a/s

with z' = ∂z/∂(h·W): the online softmax (arXiv 1805.02867), carried on to the derivative as attention does it
(arXiv 2205.14135). A tile of logits and its slice of the head stay in the cache between the two products, so on a CPU
this is faster than the products with the whole head alone, and it needs a few MiB besides the result. A divergence
needs both normalisers before its slope, so ``sweep`` computes it by rows, except on K tokens (``tiled_support``).
Shapes: n rows, K targets per row, d width, V vocabulary, v columns of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.engines.vocabulary.product import PlainHead

ROWS = 2048
"""Rows at a time: more do not make a product faster."""
TILE_BYTES = 4 * 2**20
"""A tile of logits, and a slice of the head, at most: both in a processor's cache. Measured best at 1,024 × 1,024."""
ACCELERATOR_TILE_BYTES = 64 * 2**20
LEAST_COLUMNS = 64


def logprobs(
    hidden: Float[Tensor, "N d"],
    head: PlainHead,
    targets: Int[Tensor, "N K"],
    temperature: float,
    *,
    slope: bool,
    budget_bytes: int,
) -> tuple[Float[Tensor, "N K"], Float[Tensor, "N d"] | None]:
    """Log-probs of the targets; with ``slope`` (one target per row) also their derivative by the states."""
    assert not slope or targets.shape[1] == 1, "K values per row have K derivatives"
    N, d = hidden.shape
    values = torch.empty(targets.shape, dtype=head.dtype, device=hidden.device)
    by_hidden = torch.empty(N, d, dtype=head.dtype, device=hidden.device) if slope else None
    if not N:
        return values, by_hidden
    rows, columns = sizes(hidden, head, budget_bytes)
    tiles = Tiles(head, columns, temperature)
    for start in range(0, N, rows):
        part = slice(start, min(N, start + rows))
        own = None if by_hidden is None else by_hidden[part]
        _rows(head.scaled(hidden[part]), tiles, targets[part], values[part], own)
    return values, by_hidden


def sizes(hidden: Float[Tensor, "N d"], head: PlainHead, budget_bytes: int) -> tuple[int, int]:
    """Rows and columns of a tile."""
    N, d = hidden.shape
    tile_bytes = TILE_BYTES if hidden.device.type == "cpu" else ACCELERATOR_TILE_BYTES
    rows = max(1, min(ROWS, budget_bytes // (LEAST_COLUMNS * head.dtype.itemsize)))
    rows = max(1, -(-N // -(-N // rows))) if N else 1
    columns = min(budget_bytes // rows, tile_bytes // max(rows, d)) // head.dtype.itemsize
    if columns > 512 and columns % 512 == 0:
        columns -= 64  # rows a power of two apart use the same few sets of a cache: 164 against 183 GFLOP/s
    return rows, max(1, LEAST_COLUMNS if columns < LEAST_COLUMNS else columns)


@dataclass(frozen=True, eq=False)
class Tiles:
    """Logits at ``temperature``, ``columns`` of the head at a time."""

    head: PlainHead
    columns: int
    temperature: float

    @property
    def cap(self) -> float | None:
        """The soft cap of logits that are divided by the temperature."""
        return None if self.head.softcap is None else self.head.softcap / self.temperature

    def of(self, states: Float[Tensor, "n d"]) -> Iterator[tuple[slice, Float[Tensor, "v d"], Float[Tensor, "n v"]]]:
        """Columns, their slice of the head, and their logits. The next tile reuses the memory."""
        n, most = states.shape[0], min(self.columns, self.head.weight.shape[0])
        memory = torch.empty(n * most, dtype=states.dtype, device=states.device)
        for part, weight in self.head.slices(self.columns):
            width = part.stop - part.start
            z = memory[: n * width].view(n, width)
            self.head.tile(states, part, weight, z)
            yield part, weight, z.div_(self.temperature) if self.temperature != 1 else z


def _rows(
    states: Float[Tensor, "n d"],
    tiles: Tiles,
    targets: Int[Tensor, "n K"],
    values: Float[Tensor, "n K"],
    by_states: Float[Tensor, "n d"] | None,
) -> None:
    n, device, dtype, cap = states.shape[0], states.device, states.dtype, tiles.cap
    highest = torch.full((n,), torch.finfo(dtype).min, dtype=dtype, device=device)
    total = torch.zeros(n, dtype=dtype, device=device)
    own = torch.zeros(targets.shape, dtype=dtype, device=device)  # z_y, at temperature
    if by_states is not None:
        by_states.zero_()
    for part, weight, z in tiles.of(states):
        inside = (targets >= part.start) & (targets < part.stop)
        own = torch.where(inside, z.gather(1, (targets - part.start).clamp(0, z.shape[1] - 1)), own)
        slopes = None
        if by_states is not None and cap is not None:
            slopes = torch.div(z, cap).square_().neg_().add_(1)
        above = torch.maximum(highest, z.amax(1))
        fade = torch.sub(highest, above).exp_()
        z.sub_(above[:, None]).exp_()
        total.mul_(fade).add_(z.sum(1))
        highest = above
        if by_states is not None:
            if slopes is not None:
                z.mul_(slopes)
            by_states.mul_(fade[:, None]).addmm_(z, weight)
    values.copy_(own - (highest + total.log())[:, None])
    if by_states is not None:
        target = tiles.head.weight.detach()[targets[:, 0]].to(dtype)
        if cap is not None:
            target.mul_(1 - (own / cap).square())
        by_states.div_(total[:, None]).neg_().add_(target).mul_(tiles.head.scale / tiles.temperature)
