"""RANKS: Ranks draw different numbers, each repeatably; a metric over ranks does not depend on how rows are cut.

seeds     draw(rank) differs between ranks, and is the same when it is made again
metrics   the metric of all rows is the metric of the same rows in other, uneven shards

Needs: draw(rank) for seeds; metric(shards) with rows for metrics
How: Four ranks draw, twice; the rows are cut into one, two and three uneven shards.
Exceptions: A sampler that gives all ranks the same draws on purpose (data that is split afterwards) declares no draw.
Detects: one seed for all ranks (every rank samples the same answers), a mean of the ranks' means
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from earnest_audit.law import Law
from earnest_audit.precision import rounding
from earnest_audit.verdict import Finding

RANKS = 4


@dataclass
class Ranks:
    """``draw(rank)`` gives what a rank samples (ids, noise). ``metric(shards)`` is the number that is logged for rows
    that are cut into shards, one list of rows per rank; ``rows`` [N, …] are such rows, of unequal size in their sum."""

    draw: Callable[[int], Tensor] | None = None
    metric: Callable[[list[Tensor]], float] | None = None
    rows: Tensor | None = None

    def check(self) -> Iterator[Finding]:
        if self.draw is None and self.metric is None:
            yield LAW.not_declared("ranks", "draw=… or metric=…")
        if self.draw is not None:
            yield from self._seeds(self.draw)
        if self.metric is not None and self.rows is not None:
            yield self._cuts(self.metric, self.rows)
        elif self.metric is not None:
            yield LAW.not_declared("a metric over ranks", "rows=…")

    def _seeds(self, draw: Callable[[int], Tensor]) -> Iterator[Finding]:
        drawn = [draw(rank).detach().clone() for rank in range(RANKS)]
        again = [draw(rank).detach().clone() for rank in range(RANKS)]
        alike = [f"ranks {a} and {b}" for a, b in combinations(range(RANKS), 2) if _equal(drawn[a], drawn[b])]
        more = " draw the same: their generators have one seed, and the samples of one rank are repeated on the other."
        yield LAW.none("different ranks", alike, f"{len(alike)} pairs draw the same", more)
        other = [f"rank {r}" for r in range(RANKS) if not _equal(drawn[r], again[r])]
        more = " draws something else the second time: its seed is not the only thing that it depends on."
        yield LAW.none("the same rank again", other, f"{len(other)} of {RANKS} differ", more)

    def _cuts(self, metric: Callable[[list[Tensor]], float], rows: Tensor) -> Finding:
        third = max(1, len(rows) // 4)
        cuts: list[Sequence[int]] = [(len(rows),), (third, len(rows) - third)]
        if len(rows) > 2 * third + 1:
            cuts.append((third, third + 1, len(rows) - 2 * third - 1))
        values = [float(metric([part.clone() for part in rows.split(list(cut))])) for cut in cuts if min(cut) > 0]
        scale = max(1e-12, *map(abs, values))
        off = (max(values) - min(values)) / scale
        return LAW.agrees(
            "a metric over ranks", off, max(1e-5, rounding(rows) if rows.is_floating_point() else 0.0),
            "The logged number depends on how rows are cut over ranks: a mean of the ranks' means in place of a sum "
            "over a count, a maximum or a deviation that is averaged, or the first rank's number alone.",
            f"{', '.join(f'{v:.4g}' for v in values)}: off by {{}}",
        )  # fmt: skip


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a, b))


LAW = Law("RANKS", "ranks (Ranks)", __doc__, Ranks.check)
