"""SE-ACCUMULATION: Many small backward passes, or many ranks, leave the whole batch's gradient, and so does the next
call.

accumulate(model, [B₁, B₂, …]) leaves in .grad what accumulate(model, [B₁ ∪ B₂ ∪ …]) leaves, for an UNEVEN cut;
and the same again in a second call
accumulate(model, [B, B]) has the direction of accumulate(model, [B]), whatever is taken per micro-batch

Needs: accumulate(model, batches) and a batch; precision where it is coarser and no module shows it
How: The batch in one piece, once more, and cut unevenly; the tolerance is 16 times (8 in 16 bits) the effect of one
unit in the last place.
Exceptions: Even cuts hide a mean of means. A loss that is taken per micro-batch by design (load balancing) declares
rows_interact=True; then the batch is only given twice. A clip that does not bind is not detected here: Update makes it
bind.
Detects: transformers gradient accumulation (a mean of means), gradients cleared between requests, transformers #48690
(a router's loss times the number of ranks)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from earnest_audit.gradient import Gradient
from earnest_audit.law import Law
from earnest_audit.precision import coarsest, noticing
from earnest_audit.probe import fresh
from earnest_audit.restore import without_dropout
from earnest_audit.subjects import base
from earnest_audit.verdict import Finding

SAME = 16  # units in the last place: two calls that did the same; as many times that, and they did not
LEFT = 0.25  # in 16 bits a multiple of the unit would let anything pass


@dataclass
class Accumulation:
    """``accumulate(model, batches)`` runs the micro-batches and leaves the gradients; ``split`` are uneven row
    counts. ``rows_interact``: a part of the loss is taken per micro-batch by design (a router's load balancing).
    ``precision`` is what is computed in, where that is coarser than the parameters and modules do not show it.
    ``stateful=True``: one call changes the next by design (a running statistic beside the model)."""

    model: nn.Module
    accumulate: Callable[[nn.Module, Sequence[Mapping[str, Any]]], Any]
    batch: Mapping[str, Any]
    split: Sequence[int] | None = None
    what: str = "micro-batches"
    seed: int = 0
    rows_interact: bool = False
    precision: torch.dtype | None = None
    stateful: bool = False

    def check(self) -> Iterator[Finding]:
        split, cut = base.cut(self.batch, self.split)
        subject = f"{self.what} of {split} rows"
        if self.rows_interact:
            yield from self._copies(subject)
            return
        with without_dropout(self.model):  # other parts would get other masks
            with noticing(self.model) as seen:
                whole, again = self._gradient([self.batch]), self._gradient([self.batch])
            precision = self.precision or coarsest(seen)
            twice = self._twice(whole, again, precision)
            parts = self._gradient(cut)
            room = self._room(whole, precision)
        room = max(room, 8 * whole.distance(again))
        off, factor = whole.distance(parts), parts.best_scale(whole)
        yield LAW.finding(
            subject, f"gradient off by {off:.2g} (best factor {factor:.3g})", f"≤ {room:.2g}",
            off <= room and whole.norm() > 0,
            "Cut into uneven parts, the batch gives another gradient: a mean of means, a division that is missing or "
            "done twice, gradients cleared or clipped between the parts, or only the last part counts. A loss that is "
            "taken per micro-batch by design declares rows_interact=True.",
        )  # fmt: skip
        if not self.stateful:
            yield twice

    def _copies(self, subject: str) -> Iterator[Finding]:
        """Where a part of the loss is taken per micro-batch, equal micro-batches still have the gradient of one."""
        why = "Rows interact by declaration: parts may have another gradient."
        yield LAW.not_applicable(subject, "not checked", why)
        with without_dropout(self.model):
            with noticing(self.model) as seen:
                one, two = self._gradient([self.batch]), self._gradient([self.batch, self.batch])
            room = self._room(one, self.precision or coarsest(seen))
        factor = two.best_scale(one)
        off = one.times(factor).distance(two)
        yield LAW.finding(
            f"the batch twice, as {self.what}", f"gradient off by {off:.2g} (best factor {factor:.3g})",
            f"≤ {room:.2g}, up to a factor", off <= room and one.norm() > 0,
            "The same batch twice has a gradient of another direction: a term of the loss is multiplied by the number "
            "of ranks or micro-batches, and the others are not.",
        )  # fmt: skip

    def _twice(self, whole: Gradient, again: Gradient, precision: torch.dtype | None) -> Finding:
        """Of two calls that differ, a third decides. Where it repeats one of them, or the calls are as 1 : 2 : 3, a
        call has left something for the next; noise, or a running statistic, does neither."""
        eps = [torch.finfo(p.dtype).eps for p in self.model.parameters() if p.is_floating_point()]
        same = SAME * max([*eps, *([torch.finfo(precision).eps] if precision is not None else [])], default=0.0)
        off, room = whole.distance(again), min(LEFT, SAME * same)
        subject, measured = "the same batch again", f"gradient off by {off:.2g}"
        if off > room:
            third, near = self._gradient([self.batch]), min(same, room / 2)
            repeats = min(whole.distance(third), again.distance(third)) <= near
            counted = any(
                all(whole.times(n**power).distance(g) <= near for n, g in ((2, again), (3, third)))
                for power in (1, -1)
            )  # fmt: skip
            if not (repeats or counted):
                why = "Every call gives another gradient: noise, or a running statistic. The tolerance is that wide."
                return LAW.not_applicable(subject, f"{measured}, and another way each time", why)
        return LAW.finding(
            subject, measured, f"≤ {room:.2g}", off <= room,
            "The same batch on the same weights gives another gradient the second time: a count, a sum or a gradient "
            "of the last call is still there. (Where that is intended, declare stateful=True.)",
        )  # fmt: skip

    def _room(self, whole: Gradient, precision: torch.dtype | None) -> float:
        """From the dtype and the problem: how well this gradient is conditioned."""
        return base.room_of(self.model, self.seed, precision, whole, lambda: self._gradient([self.batch]))[0]

    def _gradient(self, batches: Sequence[Mapping[str, Any]]) -> Gradient:
        """What a forward pass writes into buffers is no state of the accumulation."""
        return base.gradient_of(self.model, self.seed, lambda: self.accumulate(self.model, list(map(fresh, batches))))


LAW = Law("SE-ACCUMULATION", "accumulation (Accumulation)", __doc__, Accumulation.check)
