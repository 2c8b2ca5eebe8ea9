"""Accumulation: many small backward passes, or many ranks, must leave the whole batch's gradient.

accumulate(model, [B₁, B₂, …]) leaves in .grad what accumulate(model, [B₁ ∪ B₂ ∪ …]) leaves, for an UNEVEN cut;
and the same again in a second call
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from earnest.audit.gradient import Gradient
from earnest.audit.law import Law
from earnest.audit.probe import fresh, restored, seeded
from earnest.audit.restore import without_dropout
from earnest.audit.subjects.base import (
    coarsest,
    cut,
    judged,
    left_in,
    noticing,
    nudged,
    room_of,
    rows_of,
    uneven,
    unjudged,
)
from earnest.audit.verdict import Finding

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
    tolerance: float | None = None  # none: from what one unit in the last place of every parameter does
    seed: int = 0
    rows_interact: bool = False
    precision: torch.dtype | None = None
    stateful: bool = False

    def check(self) -> Iterator[Finding]:
        rows = rows_of(self.batch)
        split = list(self.split) if self.split is not None else uneven(rows)
        subject = f"{self.what} of {split} rows"
        if self.rows_interact:
            yield unjudged(
                "SE", subject, "not checked", "Rows interact by declaration: parts may have another gradient."
            )
            return
        with restored(self.model, None), without_dropout(self.model):  # other parts would get other masks
            with noticing(self.model) as seen:
                whole, again = self._gradient([self.batch]), self._gradient([self.batch])
            precision = self.precision or coarsest(seen)
            twice = self._twice(whole, again, precision)
            parts = self._gradient(list(cut(self.batch, rows, split)))
            room = self._room(whole, precision) if self.tolerance is None else self.tolerance
        room = max(room, 8 * whole.distance(again))
        off, factor = whole.distance(parts), parts.best_scale(whole)
        yield judged(
            "SE",
            subject,
            f"gradient off by {off:.2g} (best factor {factor:.3g})",
            f"≤ {room:.1g}",
            off <= room and whole.norm() > 0,
            "Cut into uneven parts, the batch gives another gradient: a mean of means, a division that is missing or "
            "done twice, gradients cleared or clipped between the parts, or only the last part counts. A loss that is "
            "taken per micro-batch by design declares rows_interact=True.",
        )
        if not self.stateful:
            yield twice

    def _twice(self, whole: Gradient, again: Gradient, precision: torch.dtype | None) -> Finding:
        """Of two calls that differ, a third decides. Where it repeats one of them, or the calls are as 1 : 2 : 3, a
        call has left something after; noise, or a statistic that runs, does neither."""
        eps = [torch.finfo(p.dtype).eps for p in self.model.parameters() if p.is_floating_point()]
        same = SAME * max([*eps, *([torch.finfo(precision).eps] if precision is not None else [])], default=0.0)
        off, room = whole.distance(again), min(LEFT, SAME * same)
        subject, measured = "the same batch again", f"gradient off by {whole.distance(again):.2g}"
        if off <= room:
            return judged("SE", subject, measured, f"≤ {room:.1g}", True, "")
        third = self._gradient([self.batch])
        repeats = min(whole.distance(third), again.distance(third)) <= min(same, room / 2)
        counted = any(
            all(whole.times(n**power).distance(g) <= min(same, room / 2) for n, g in ((2, again), (3, third)))
            for power in (1, -1)
        )
        if not (repeats or counted):
            return unjudged(
                "SE", subject, f"{measured}, and another way each time",
                "Every call gives another gradient: noise, or a statistic that runs. The tolerance is as wide as that.",
            )  # fmt: skip
        return judged(
            "SE", subject, measured, f"≤ {room:.1g}", False,
            "The same batch on the same weights gives another gradient the second time: a count, a sum or a gradient "
            "of the last call is still there. (Where that is meant, declare stateful=True.)",
        )  # fmt: skip

    def _room(self, whole: Gradient, precision: torch.dtype | None) -> float:
        """From the dtype and the problem: how well this gradient is conditioned."""
        unit = nudged(self.model, self.seed, precision)
        return room_of(whole.distance(self._gradient([self.batch])), unit)

    def _gradient(self, batches: Sequence[Mapping[str, Any]]) -> Gradient:
        with restored(self.model, None):  # what a forward pass writes into buffers is no state of the accumulation
            for p in self.model.parameters():
                p.grad = None
            with seeded(self.seed), torch.enable_grad():
                self.accumulate(self.model, [fresh(b) for b in batches])
            return left_in(self.model)


LAW = Law(
    code="SE",
    name="accumulation (Accumulation)",
    sentence="Many small backward passes, or many ranks, leave the whole batch's gradient, and so does the next call.",
    needs="accumulate(model, batches) and a batch; precision where it is coarser and no module shows it",
    how="The batch in one piece, once more, and cut unevenly; the tolerance is 16 times (8 in 16 bits) the effect of "
    "one unit in the last place.",
    traps="Even cuts hide a mean of means. A loss that is taken per micro-batch by design (load balancing) declares "
    "rows_interact=True. A clip that does not bind is not detected here: Update makes it bind.",
    caught="transformers gradient accumulation (a mean of means), gradients cleared between requests",
    check=Accumulation.check,
)
