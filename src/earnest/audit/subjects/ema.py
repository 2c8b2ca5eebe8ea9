"""Ema: a moving average of weights (an average for evaluation, a slow reference, a target network).

update(average, current, rate):  rate 0 keeps the average, 1 copies the current weights, a small one moves it little
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from earnest.audit.law import Law
from earnest.audit.subjects.base import gap, judged, largest, rounding
from earnest.audit.verdict import Finding

SMALL = 2.0**-4  # exact in every dtype


@dataclass
class Ema:
    """``update(average, current, rate)`` changes ``average`` in place, or returns the new one. ``rate`` is the weight
    of the current weights: where the code has a decay, hand it 1 - rate."""

    update: Callable[[Tensor, Tensor, float], Tensor | None]
    size: int = 7
    dtype: torch.dtype = torch.float32

    def check(self) -> Iterator[Finding]:
        rng = torch.Generator().manual_seed(0)
        old, new = (torch.randn(self.size, generator=rng).to(self.dtype) for _ in range(2))
        apart = largest(gap(old, new))
        for subject, current, rate, wanted, meaning in (
            ("rate 0", new, 0.0, old, "At rate 0 the average must stay. It does not: rate and decay are swapped."),
            ("rate 1", new, 1.0, new, "At rate 1 the average must be the current weights. It is not: rate and decay "
             "are swapped, or the result is discarded."),
            (f"rate {SMALL:g}", new, SMALL, old + SMALL * (new - old), "A small rate must move the average by that "
             "share of the way: a large move is rate and decay swapped, none is a result that is discarded."),
            ("equal weights", old, 0.5, old, "An average of equal weights must stay: the two weights do not add to 1."),
        ):  # fmt: skip
            off = largest(gap(self._after(old, current, rate), wanted)) / apart
            room = rounding(old)
            yield judged("LAW", subject, f"{off:.2g} of the way off", f"≤ {room:.1g}", off <= room, meaning)

    def _after(self, average: Tensor, current: Tensor, rate: float) -> Tensor:
        kept = average.clone()
        given = self.update(kept, current.clone(), rate)
        return given if isinstance(given, Tensor) else kept


LAW = Law(
    code="LAW",
    name="moving average (Ema)",
    sentence="Rate 0 keeps an average of weights, 1 copies, a small one moves it little; equal weights stay.",
    needs="update(average, current, rate), rate being the current weights' weight",
    how="Random weights at three rates. The tolerance is rounding in their dtype.",
    traps="A decay is 1 - rate: hand it over so.",
    caught="TRL #4935 (rate and decay swapped)",
    check=Ema.check,
)
