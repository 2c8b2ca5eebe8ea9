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

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from earnest_audit.law import Law
from earnest_audit.precision import COARSE, rounding
from earnest_audit.restore import seeded
from earnest_audit.subjects.base import gap, largest
from earnest_audit.verdict import Finding

SMALL = 2.0**-4  # exact in every dtype
USUAL = 1e-3  # what a decay of 0.999 leaves
WARM = 2000  # updates after which every usual warm-up of a decay is over at SMALL
MOST = 4096  # updates, however small a rate is


@dataclass
class Ema:
    """``update(average, current, rate)`` changes ``average`` in place, or returns the new one. ``rate`` is the weight
    of the current weights: where the code has a decay, hand it 1 - rate. A decay that warms up with the number of
    updates is recognised by its own behaviour; an ``update`` with such a count is an object that can be deep-copied.

    ``dtype`` is what the average and the current weights are kept in, and passed in. The field ``rate`` is that of
    the run: in 16 bits an average at a small rate stays constant, so whether this one's updates add up is checked.
    ``every``: only each such call moves the average, from the first one on.
    """

    update: Callable[[Tensor, Tensor, float], Tensor | None]
    size: int = 7
    dtype: torch.dtype = torch.float32
    rate: float | None = None
    every: int = 1

    def check(self) -> Iterator[Finding]:
        rng = torch.Generator().manual_seed(0)
        old, new = (torch.randn(self.size, generator=rng).to(self.dtype) for _ in range(2))
        rows = list(self._rows(self.update, old, new))
        if any(f.outcome == "fails" for f in rows):
            before = self._off(self._copy(self.update), old, new, 0.0, old)
            warmed = self._warmed(old, new)
            later = list(self._rows(warmed, old, new, before))
            rows = rows if any(f.outcome == "fails" for f in later) else later
        yield from rows
        yield self._untouched(old, new)
        yield self._again(old, new)
        yield self._adds_up(old, new)

    def _rows(
        self, update: Callable[..., Tensor | None], old: Tensor, new: Tensor, before: float | None = None
    ) -> Iterator[Finding]:
        """``before`` is what rate 0 was off by at first, where the update has been warmed up since: a warm-up holds the
        rate above 0 for ever, and ever less."""
        for subject, current, rate, wanted, meaning in (
            ("rate 0", new, 0.0, old, "At rate 0 the average must stay. It does not: rate and decay are swapped."),
            ("rate 1", new, 1.0, new, "At rate 1 the average must be the current weights. It is not: rate and decay "
             "are swapped, or the result is discarded."),
            (f"rate {SMALL:g}", new, SMALL, old + SMALL * (new - old), "A small rate must move the average by that "
             "share of the way: a large move is rate and decay swapped, none is a result that is discarded."),
            ("equal weights", old, 0.5, old, "An average of equal weights must stay: the two weights do not add to 1."),
        ):  # fmt: skip
            off, room = self._off(self._copy(update), old, current, rate, wanted, largest(gap(old, new))), rounding(old)
            if before is not None:
                room = max(room, min(SMALL, before / 4)) if rate == 0 else room
                subject = f"{subject}, after {WARM} updates"
            yield LAW.agrees(subject, off, room, meaning, "{} of the way off")

    def _untouched(self, old: Tensor, new: Tensor) -> Finding:
        current = new.clone()
        self._copy(self.update)(old.clone(), current, SMALL)
        moved = largest(gap(current, new))
        why = "An update of the average writes into the weights that are trained."
        return LAW.finding(
            "the current weights afterwards", f"moved by {moved:.2g}", "bit-equal", current.equal(new), why
        )

    def _again(self, old: Tensor, new: Tensor) -> Finding:
        """Two updates at one rate leave (1 - rate)² of the way; a decay that warms up does so later."""
        wanted, room = new + (1 - SMALL) ** 2 * (old - new), 2 * rounding(old)
        off = math.inf
        for update in (self._copy(self.update), self._warmed(old, new)):
            with seeded(0):
                once = _given(update, old.clone(), new.clone(), SMALL)
                for _ in range(self.every):
                    twice = _given(update, once.clone(), new.clone(), SMALL)
            off = min(off, largest(gap(twice, wanted)) / largest(gap(old, new)))
            if off <= room:
                break
        other = "The second update is not like the first: it changes its own rate, or keeps something of the first."
        return LAW.agrees(f"rate {SMALL:g}, a second time", off, room, other, "{} of the way off")

    def _adds_up(self, old: Tensor, new: Tensor) -> Finding:
        """1/rate updates go two thirds of the way; at least half of that is required."""
        coarse = torch.finfo(self.dtype).eps > COARSE
        if self.rate is None and coarse:
            return LAW.not_declared("many updates", "rate=…, that of the run,")
        rate = USUAL if self.rate is None else self.rate
        updates = min(MOST, math.ceil(1 / rate)) if rate > 0 else 0
        update, average = self._copy(self.update), old.clone()
        with seeded(0):
            for _ in range(updates):
                average = _given(update, average, new.clone(), rate)
        way = (new - old).double()
        share = float(((average - old).double() * way).sum() / (way * way).sum())
        wanted = 0.5 * (1 - (1 - rate) ** updates)
        return LAW.finding(
            f"many updates at rate {rate:g}", f"{share:.2g} of the way after {updates}", f"≥ {wanted:.2g}",
            share >= wanted,
            f"Updates at this rate are rounded away in {self.dtype}: the average stays constant. Keep it in fp32.",
        )  # fmt: skip

    def _warmed(self, old: Tensor, new: Tensor) -> Callable[..., Tensor | None]:
        """The update after many."""
        update, average = self._copy(self.update), old.clone()
        for _ in range(WARM):
            average = _given(update, average, new.clone(), SMALL)
        return update

    @staticmethod
    def _copy(update: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
        try:
            return copy.deepcopy(update)
        except Exception:  # what cannot be copied is taken as it is
            return update

    @staticmethod
    def _off(
        update: Callable[..., Tensor | None],
        old: Tensor,
        current: Tensor,
        rate: float,
        wanted: Tensor,
        way: float = 0.0,
    ) -> float:
        """In shares of the way from the average to the current weights."""
        return largest(gap(_given(update, old.clone(), current.clone(), rate), wanted)) / (
            way or largest(gap(old, current))
        )


def _given(update: Callable[..., Tensor | None], average: Tensor, current: Tensor, rate: float) -> Tensor:
    given = update(average, current, rate)
    return given if isinstance(given, Tensor) else average


LAW = Law("EMA", "moving average (Ema)", __doc__, Ema.check)
