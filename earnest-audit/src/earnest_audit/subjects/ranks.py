"""RANKS: Ranks draw different numbers, each repeatably; a metric over ranks does not depend on how rows are cut.

seeds     draw(rank) differs between ranks, and is the same when it is made again
metrics   the metric of all rows is the metric of the same rows in other, uneven shards, and what one process computes

Needs: draw(rank) for seeds; metric(shards) with rows for metrics; single, the same number computed in one process;
by_rank=True where the number depends on the cut by its definition
How: Four ranks draw, twice; the rows are cut into one, two and three uneven shards.
Exceptions: A metric that depends on the cut by its definition (the largest mean of any rank) is only compared with
single. A sampler that gives all ranks the same draws on purpose (data that is split afterwards) declares no draw.
Detects: one seed for all ranks (every rank samples the same answers), a mean of the ranks' means, TRL #7100 and #5620
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from torch import Tensor

from earnest_audit.law import Law
from earnest_audit.precision import rounding
from earnest_audit.subjects.base import equal
from earnest_audit.verdict import Finding

RANKS = 4


@dataclass
class Ranks:
    """``draw(rank)`` gives what a rank samples (ids, noise). ``metric(shards)`` is the number that is logged for rows
    that are cut into shards, one list of rows per rank; ``rows`` [N, …] are such rows, of unequal size in their sum.
    ``single(shards)`` is what the metric is by its definition, computed in one process. ``by_rank=True`` where the
    number depends on the cut by its definition: then it is only compared with ``single``."""

    draw: Callable[[int], Tensor] | None = None
    metric: Callable[[list[Tensor]], float] | None = None
    rows: Tensor | None = None
    single: Callable[[list[Tensor]], float] | None = None
    by_rank: bool = False

    def check(self) -> Iterator[Finding]:
        if self.draw is None and self.metric is None:
            yield LAW.not_declared("ranks", "draw=… or metric=…")
        if self.draw is not None:
            yield from self._seeds(self.draw)
        if self.metric is not None and self.rows is not None:
            yield from self._cuts(self.metric, self.rows)
        elif self.metric is not None:
            yield LAW.not_declared("a metric over ranks", "rows=…")

    def _seeds(self, draw: Callable[[int], Tensor]) -> Iterator[Finding]:
        drawn = [draw(rank).detach().clone() for rank in range(RANKS)]
        again = [draw(rank).detach().clone() for rank in range(RANKS)]
        alike = [f"ranks {a} and {b}" for a, b in combinations(range(RANKS), 2) if equal(drawn[a], drawn[b])]
        more = " draw the same: their generators have one seed, and the samples of one rank are repeated on the other."
        yield LAW.none("different ranks", alike, f"{len(alike)} pairs draw the same", more)
        other = [f"rank {r}" for r in range(RANKS) if not equal(drawn[r], again[r])]
        more = " draws something else the second time: its seed is not the only thing that it depends on."
        yield LAW.none("the same rank again", other, f"{len(other)} of {RANKS} differ", more)

    def _cuts(self, metric: Callable[[list[Tensor]], float], rows: Tensor) -> Iterator[Finding]:
        n, few = len(rows), max(1, len(rows) // 4)
        cuts = [cut for cut in ([n], [few, n - few], [few, few + 1, n - 2 * few - 1]) if min(cut) > 0]
        values = [float(metric([part.clone() for part in rows.split(cut)])) for cut in cuts]
        room = max(1e-5, rounding(rows) if rows.is_floating_point() else 0.0)
        if self.single is not None:
            own = [float(self.single([part.clone() for part in rows.split(cut)])) for cut in cuts]
            away = max(abs(a - b) / max(1e-12, abs(a), abs(b)) for a, b in zip(values, own, strict=True))
            yield LAW.agrees(
                "the metric in one process", away, room,
                "The logged number is not what one process computes from the same rows: tokens are counted on every "
                "rank that holds them, other places are averaged than declared, or a weight is applied twice.",
                f"{values[-1]:.4g} and {own[-1]:.4g}: off by {{}}",
            )  # fmt: skip
        if self.by_rank:
            return
        scale = max(1e-12, *map(abs, values))
        off = (max(values) - min(values)) / scale
        yield LAW.agrees(
            "a metric over ranks", off, room,
            "The logged number depends on how rows are cut over ranks: a mean of the ranks' means in place of a sum "
            "over a count, a maximum or a deviation that is averaged, or the first rank's number alone.",
            f"{', '.join(f'{v:.4g}' for v in values)}: off by {{}}",
        )  # fmt: skip


LAW = Law("RANKS", "ranks (Ranks)", __doc__, Ranks.check)
