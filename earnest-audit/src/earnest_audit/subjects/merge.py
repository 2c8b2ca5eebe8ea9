"""MERGE: merge(-w) = -merge(w), merge(½) = ½·merge(1), a repeated merge(1) is the same, and merged = unmerged.

Needs: delta(w); applied(w) for the unmerged effect; linear=False for DoRA; once=True where it can be merged only once
How: Differences of the merged weights. The tolerance is their dtype's rounding, or 16 times what a weight of 1 ± 2⁻¹²
misses by, where a small difference is written into large weights.
Exceptions: A difference of bf16 weights is coarse; the tolerance shows it. DoRA is not linear in its weight.
Detects: a square root or an absolute value of the weight, another scale in the merged path
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from earnest_audit.law import Law
from earnest_audit.precision import rounding
from earnest_audit.subjects.base import gap, largest
from earnest_audit.verdict import Finding

NUDGE = 2.0**-12


@dataclass
class Merge:
    """``delta(w)`` is what merging an adapter with weight w adds to the base; ``applied(w)`` is the unmerged effect,
    where it is known. ``linear=False`` where the weight does not act linearly by design (DoRA divides by a norm).
    ``once=True`` where the adapter can be merged a single time: then only merged = unmerged is checked."""

    delta: Callable[[float], Tensor]
    applied: Callable[[float], Tensor] | None = None
    linear: bool = True
    once: bool = False

    def check(self) -> Iterator[Finding]:
        applied = None if self.applied is None else self.applied(1.0).detach().clone()
        one = self.delta(1.0).detach().clone()
        size = max(largest(one.abs()), 1e-12)
        room = self._room(one, size)
        changes = bool((one != 0).any())
        yield LAW.finding("merge(1)", f"changes weights by {size:.2g}", "above 0", changes, "Merging adds nothing.")
        if self.once:
            yield LAW.not_applicable("merge(1) again", "it can be merged once, by declaration")
        else:
            for subject, off, meaning in self._repeated(one):
                yield LAW.agrees(subject, off / size, room, meaning)
        if applied is not None:
            other = "The merged model is another one than the adapter beside its layer."
            yield LAW.agrees("merged = unmerged", largest(gap(applied, one)) / size, room, other)

    def _repeated(self, one: Tensor) -> Iterator[tuple[str, float, str]]:
        own = "Adapters that are not linear in their weight (DoRA) declare linear=False."
        if self.linear:
            yield "merge(-w) = -merge(w)", largest((one + self.delta(-1.0)).abs()), (
                f"Merging with a negative weight is not the opposite: a root or an absolute value of the weight. {own}"
            )  # fmt: skip
            scaled = f"The weight does not scale the merged difference linearly. {own}"
            yield "merge(½) = ½·merge(1)", largest((self.delta(0.5) * 2 - one).abs()), scaled
        yield "merge(1) again", largest(gap(self.delta(1.0), one)), (
            "A second merge adds something else: the base or the adapter was written into by the last merge."
        )  # fmt: skip

    def _room(self, one: Tensor, size: float) -> float:
        """A difference of large weights is as fine as those are: what a weight of 1 ± 2⁻¹² (or four units in the last
        place, where they are more) misses by measures how fine. A smooth curve misses next to nothing of the middle."""
        if self.once:
            return rounding(one)
        nudge = max(NUDGE, 4 * torch.finfo(one.dtype).eps)
        above, below = self.delta(1 + nudge), self.delta(1 - nudge)
        if self.linear:
            grain = max(largest((d - w * one).abs()) for w, d in ((1 + nudge, above), (1 - nudge, below))) / size
        else:
            grain = largest((above + below - 2 * one).abs()) / size
        return min(0.5, max(16 * grain, rounding(one)))


LAW = Law("MERGE", "merge (Merge)", __doc__, Merge.check)
