"""RT-GATHER: Every rank receives what every rank sent.

Needs: gather(values); ragged=True where ranks may send different lengths; padding where a value is never sent
How: Every rank sends its own numbers, then 0, -1 and -100; then twelve ranks do; everything received is compared.
Exceptions: Padding that is not removed is checked only where ragged is declared, or lengths are equal.
Detects: all_gather into [t] * world_size, buckets that are not cut back
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from earnest_audit.law import Law
from earnest_audit.verdict import Finding

MANY = 12  # ranks: one more digit
ODD = (0.0, -100.0, -1.0)


@dataclass
class Gather:
    """``gather(values)`` simulates ranks that send one tensor each, as many as there are values, and returns what a
    rank receives. ``ragged`` where ranks may send different lengths. ``padding``: a value that no rank ever sends, and
    that may be taken for padding; without it every value must arrive."""

    gather: Callable[[list[Tensor]], Sequence[Tensor]]
    ranks: int = 3
    ragged: bool = False
    padding: float | None = None

    def check(self) -> Iterator[Finding]:
        plain = self._row("ranks", self._counted([3] * self.ranks))
        yield plain
        if self.ragged:
            yield self._row("ranks of different lengths", self._counted([rank + 2 for rank in range(self.ranks)]))
        else:
            yield LAW.not_declared("ranks of different lengths", "ragged=True, where ranks may send them,")
        if plain.outcome == "holds":
            yield self._row("values such as 0 and -100", self._odd())
        if plain.outcome == "holds" and self.ranks < MANY:
            yield self._many()

    def _counted(self, lengths: Sequence[int]) -> list[Tensor]:
        return [torch.arange(n, dtype=torch.float32) + 10 * (rank + 1) for rank, n in enumerate(lengths)]

    def _odd(self) -> list[Tensor]:
        """What is often taken for padding, in front and at the end; one rank sends nothing else."""
        odd = [v for v in ODD if v != self.padding]
        sent = []
        for rank in range(self.ranks):
            value, other = odd[rank % len(odd)], odd[(rank + 1) % len(odd)]
            sent.append(torch.tensor([value, 7.0 + rank, other] if rank else [value] * 3))
        return sent

    def _many(self) -> Finding:
        """At least 11 ranks, so that their names sort differently as texts: rank10 before rank2."""
        subject, sent, why = f"{MANY} ranks", self._counted([3] * MANY), "It simulates another number of ranks."
        try:
            got = list(self.gather([t.clone() for t in sent]))
        except Exception as error:
            return LAW.not_applicable(subject, f"raises {type(error).__name__}", why)
        if len(got) != MANY:
            return LAW.not_applicable(subject, f"{len(got)} came back", why)
        return self._row(subject, sent)

    def _row(self, subject: str, sent: Sequence[Tensor]) -> Finding:
        got = [t.flatten().tolist() for t in self.gather([t.clone() for t in sent])]
        wanted = [t.tolist() for t in sent]
        return LAW.finding(
            subject, f"{got}", f"{wanted}", got == wanted,
            "A rank does not have what every rank sent: all slots are one tensor, the order is lost (rank10 before "
            "rank2), padding is not cut off again, or what looks like padding is.",
        )  # fmt: skip


LAW = Law("RT-GATHER", "gather (Gather)", __doc__, Gather.check)
