"""Adapters that are merged into their layers.

Merge        merged = unmerged; merge(-w) = -merge(w); asked again it is the same
MergedLayer  merging, once or twice, and unmerging do not change the layer's output
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from earnest.audit.law import Law
from earnest.audit.subjects.base import gap, judged, largest, rounding, unjudged
from earnest.audit.verdict import Finding

NUDGE = 2.0**-12


@dataclass
class Merge:
    """``delta(w)`` is what merging an adapter with weight w adds to the base; ``applied(w)`` the unmerged effect, if
    at hand. ``linear=False`` where the weight does not act linearly by design (DoRA divides by a norm)."""

    delta: Callable[[float], Tensor]
    applied: Callable[[float], Tensor] | None = None
    tolerance: float | None = None  # none: from the dtype and from how finely the merged weights can be written
    linear: bool = True

    def check(self) -> Iterator[Finding]:
        one = self.delta(1.0).detach().clone()
        size = max(largest(one.abs()), 1e-12)
        room = self._room(one, size) if self.tolerance is None else self.tolerance
        yield judged(
            "GL",
            "merge(1)",
            f"changes weights by {size:.2g}",
            "above 0",
            bool((one != 0).any()),
            "Merging adds nothing.",
        )
        if self.linear:
            yield from self._linear(one, size, room)
        again = largest(gap(self.delta(1.0), one)) / size
        yield judged(
            "MERGE",
            "merge(1) again",
            f"off by {again:.2g}",
            f"≤ {room:.1g}",
            again <= room,
            "Asked again, merging adds something else: the base or the adapter was written into by the last merge.",
        )
        if self.applied is not None:
            apart = largest(gap(self.applied(1.0), one)) / size
            yield judged(
                "DF",
                "merged = unmerged",
                f"off by {apart:.2g}",
                f"≤ {room:.1g}",
                apart <= room,
                "The merged model is another one than the adapter beside its layer.",
            )

    def _linear(self, one: Tensor, size: float, room: float) -> Iterator[Finding]:
        off = largest((one + self.delta(-1.0)).abs()) / size
        yield judged(
            "MERGE",
            "merge(-w) = -merge(w)",
            f"off by {off:.2g}",
            f"≤ {room:.1g}",
            off <= room,
            "Merging with a negative weight is not the opposite: a square root or an absolute value of the weight. "
            "Adapters that are not linear in their weight (DoRA) declare linear=False.",
        )
        half = largest((self.delta(0.5) * 2 - one).abs()) / size
        yield judged(
            "MERGE",
            "merge(½) = ½·merge(1)",
            f"off by {half:.2g}",
            f"≤ {room:.1g}",
            half <= room,
            "The weight does not scale the merged difference linearly. Adapters that are not linear in their weight "
            "(DoRA) declare linear=False.",
        )

    def _room(self, one: Tensor, size: float) -> float:
        """A difference of large weights is as fine as those are: what a weight of 1 ± 2⁻¹² (or four units in the last
        place, where they are more) misses by says how fine. A smooth curve misses next to nothing of the middle."""
        nudge = max(NUDGE, 4 * torch.finfo(one.dtype).eps)
        above, below = self.delta(1 + nudge), self.delta(1 - nudge)
        if self.linear:
            grain = max(largest((d - w * one).abs()) for w, d in ((1 + nudge, above), (1 - nudge, below))) / size
        else:
            grain = largest((above + below - 2 * one).abs()) / size
        return min(0.5, max(16 * grain, rounding(one)))


@dataclass
class MergedLayer:
    """``outputs()`` is the output of the layer or model, adapter included; ``merge()`` writes the adapter into the
    weights and ``unmerge()`` takes it out again. Without ``unmerge`` the layer is left merged."""

    outputs: Callable[[], Tensor]
    merge: Callable[[], Any]
    unmerge: Callable[[], Any] | None = None
    tolerance: float | None = None  # none: rounding in the outputs' dtype, relative to the largest

    def check(self) -> Iterator[Finding]:
        before = self._outputs()
        room = rounding(before) if self.tolerance is None else self.tolerance
        again = ""
        self.merge()
        once = "The merged layer has another output: it still adds its adapter beside the merged weights, or "
        yield self._row("outputs, merged", before, room, f"{once}merges with another scale.")
        try:
            self.merge()
        except Exception as error:  # a refusal is as good as doing nothing
            again = f" (refused: {type(error).__name__})"
        twice = "A second merge adds the adapter again: nothing remembers that it is in the weights."
        yield self._row(f"outputs, merged twice{again}", before, room, twice)
        if self.unmerge is None:
            yield unjudged("DF", "outputs, unmerged", "not checked", "Declare unmerge=… and it is checked.")
            return
        self.unmerge()
        back = "Merging and unmerging do not cancel: another scale, a cast, or a flag that is not restored."
        yield self._row("outputs, unmerged", before, room, back)

    def _outputs(self) -> Tensor:
        with torch.no_grad():
            return self.outputs().detach().clone()

    def _row(self, subject: str, before: Tensor, room: float, meaning: str) -> Finding:
        finite = before[before.isfinite()].abs()
        off = largest(gap(self._outputs(), before)) / max(largest(finite), 1e-12)
        return judged("DF", subject, f"off by {off:.2g}", f"≤ {room:.1g}", off <= room, meaning)


LAWS = (
    Law(
        code="MERGE",
        name="merge (Merge)",
        sentence="merge(-w) = -merge(w), merge(½) = ½·merge(1), a repeated merge(1) is the same, and merged = "
        "unmerged.",
        needs="delta(w); applied(w) for the unmerged effect; linear=False for DoRA",
        how="Differences of the merged weights. The tolerance is their dtype's rounding, or 16 times what a weight of "
        "1 ± 2⁻¹² misses by, where a small difference is written into large weights.",
        traps="A difference of bf16 weights is coarse; the tolerance shows it. DoRA is not linear in its weight.",
        caught="a square root or an absolute value of the weight, another scale in the merged path",
        check=Merge.check,
    ),
    Law(
        code="DF",
        name="merged layer (MergedLayer)",
        sentence="Merging once, merging twice and unmerging do not change the layer's output.",
        needs="outputs(), merge(); unmerge() for the way back",
        how="Outputs before and after each call. The tolerance is rounding in their dtype, relative to the largest.",
        traps="A layer may refuse a second merge. Without unmerge it is left merged.",
        caught="candle-lora #26 (a merged layer adds its adapter again)",
        check=MergedLayer.check,
    ),
)
