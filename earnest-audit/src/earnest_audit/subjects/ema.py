"""EMA: Rate 0 keeps an average of weights, rate 1 copies the current ones, a small rate moves it a little, many such
updates add up; equal weights stay equal, and the current weights are not modified.

update(average, current, rate):  rate 0 keeps the average, 1 copies the current weights, a small one moves it little,
many small ones add up, and the current weights are left alone

Needs: update(average, current, rate), rate being the current weights' weight; dtype and rate where it is kept in 16
bits
How: Random weights at three rates, then 1/rate updates, which must move the average at least half as far as they
should. The tolerance is rounding in the dtype.
Exceptions: A decay is 1 - rate: pass the rate. A decay that warms up is judged after 2000 updates, where rate 0 may
still move it a little.
Detects: TRL #4935 (rate and decay swapped), diffusers #1864 (a decay that overwrites itself), averages in bf16 at a
decay of 0.999
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from earnest_audit.law import Law
from earnest_audit.precision import COARSE, rounding
from earnest_audit.restore import seeded
from earnest_audit.subjects.base import copied, gap, largest
from earnest_audit.verdict import Finding

SMALL = 2.0**-4  # exact in every dtype
USUAL = 1e-3  # what a decay of 0.999 leaves
WARM = 2000  # updates after which every usual warm-up of a decay is over at SMALL
MOST = 4096  # updates, however small a rate is
OFF = "{} of the way off"
Average = Callable[[Tensor, Tensor, float], Tensor | None]


@dataclass
class Ema:
    """``update(average, current, rate)`` changes ``average`` in place, or returns the new one. ``rate`` is the weight
    of the current weights: where the code has a decay, hand it 1 - rate. A decay that warms up with the number of
    updates is recognised by its own behaviour; an ``update`` with such a count is an object that can be deep-copied.

    ``dtype`` is what the average and the current weights are kept in, and passed in. The field ``rate`` is that of
    the run: in 16 bits an average at a small rate stays constant, so whether this one's updates add up is checked.
    ``every``: only each such call moves the average, from the first one on.
    """

    update: Average
    size: int = 7
    dtype: torch.dtype = torch.float32
    rate: float | None = None
    every: int = 1

    def check(self) -> Iterator[Finding]:
        rng = torch.Generator().manual_seed(0)
        old, new = (torch.randn(self.size, generator=rng).to(self.dtype) for _ in range(2))
        rows = list(self._rows(self.update, old, new))
        warmed, _ = self._run(self.update, old, new, SMALL, WARM)
        later = list(self._rows(warmed, old, new, warm=True))
        fails = [any(f.outcome == "fails" for f in found) for found in (rows, later)]
        yield from later if fails == [True, False] else rows
        current = new.clone()
        copied(self.update)(old.clone(), current, SMALL)
        moved, why = largest(gap(current, new)), "An update of the average writes into the weights that are trained."
        same = current.equal(new)
        yield LAW.finding("the current weights afterwards", f"moved by {moved:.2g}", "bit-equal", same, why)
        # Two updates at one rate leave (1 - rate)² of the way; a decay that warms up does so later.
        wanted = new + (1 - SMALL) ** 2 * (old - new)
        twice = [self._run(update, old, new, SMALL, 1 + self.every)[1] for update in (self.update, warmed)]
        off = min(largest(gap(found, wanted)) for found in twice) / largest(gap(old, new))
        other = "The second update is not like the first: it changes its own rate, or keeps something of the first."
        yield LAW.agrees(f"rate {SMALL:g}, a second time", off, 2 * rounding(old), other, OFF)
        yield self._adds_up(old, new)

    def _rows(self, update: Average, old: Tensor, new: Tensor, warm: bool = False) -> Iterator[Finding]:
        """``warm``: the update has been made many times. A warm-up holds the rate above 0 for ever, and ever less."""
        for subject, current, rate, wanted, meaning in (
            ("rate 0", new, 0.0, old, "At rate 0 the average must stay. It does not: rate and decay are swapped."),
            ("rate 1", new, 1.0, new, "At rate 1 the average must be the current weights. It is not: rate and decay "
             "are swapped, or the result is discarded."),
            (f"rate {SMALL:g}", new, SMALL, old + SMALL * (new - old), "A small rate must move the average by that "
             "share of the way: a large move is rate and decay swapped, none is a result that is discarded."),
            ("equal weights", old, 0.5, old, "An average of equal weights must stay: the two weights do not add to 1."),
        ):  # fmt: skip
            off = largest(gap(self._run(update, old, current, rate)[1], wanted)) / largest(gap(old, new))
            room = SMALL if warm and rate == 0 else rounding(old)
            yield LAW.agrees(f"{subject}, after {WARM} updates" if warm else subject, off, room, meaning, OFF)

    def _adds_up(self, old: Tensor, new: Tensor) -> Finding:
        """1/rate updates go two thirds of the way; at least half of that is required."""
        if self.rate is None and torch.finfo(self.dtype).eps > COARSE:
            return LAW.not_declared("many updates", "rate=…, that of the run,")
        rate = USUAL if self.rate is None else self.rate
        updates = min(MOST, math.ceil(1 / rate)) if rate > 0 else 0
        _, average = self._run(self.update, old, new, rate, updates)
        way = (new - old).double()
        share = float(((average - old).double() * way).sum() / (way * way).sum())
        wanted = 0.5 * (1 - (1 - rate) ** updates)
        return LAW.finding(
            f"many updates at rate {rate:g}", f"{share:.2g} of the way after {updates}", f"≥ {wanted:.2g}",
            share >= wanted,
            f"Updates at this rate are rounded away in {self.dtype}: the average stays constant. Keep it in fp32.",
        )  # fmt: skip

    @staticmethod
    def _run(update: Average, old: Tensor, new: Tensor, rate: float, calls: int = 1) -> tuple[Average, Tensor]:
        """A copy of the update after so many calls, and the average that they leave."""
        update, average = copied(update), old.clone()
        with seeded(0):
            for _ in range(calls):
                given = update(average, new.clone(), rate)
                average = given if isinstance(given, Tensor) else average
        return update, average


LAW = Law("EMA", "moving average (Ema)", __doc__, Ema.check)
