"""Accumulation: many small backward passes, or many ranks, must leave the whole batch's gradient.

accumulate(model, [B₁, B₂, …]) leaves in .grad what accumulate(model, [B₁ ∪ B₂ ∪ …]) leaves, for an UNEVEN cut
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from earnest.audit.gradient import Gradient
from earnest.audit.law import Law
from earnest.audit.probe import fresh, restored, seeded
from earnest.audit.restore import without_dropout
from earnest.audit.subjects.base import judged
from earnest.audit.verdict import Finding


@dataclass
class Accumulation:
    """``accumulate(model, batches)`` runs the micro-batches and leaves the gradients; ``split`` are uneven row
    counts."""

    model: nn.Module
    accumulate: Callable[[nn.Module, Sequence[Mapping[str, Any]]], Any]
    batch: Mapping[str, Any]
    split: Sequence[int] | None = None
    what: str = "micro-batches"
    tolerance: float | None = None  # none: 16 times what one unit in the last place of every parameter does
    seed: int = 0

    def check(self) -> Iterator[Finding]:
        sizes = [v.shape[0] for v in self.batch.values() if isinstance(v, Tensor) and v.ndim]
        rows = max(set(sizes), key=sizes.count)
        split = list(self.split) if self.split is not None else _uneven(rows)
        with restored(self.model, None), without_dropout(self.model):  # other parts would get other masks
            whole, again = self._gradient([self.batch]), self._gradient([self.batch])
            parts = self._gradient(list(_cut(self.batch, rows, split)))
            room = self._room(whole) if self.tolerance is None else self.tolerance
        room = max(room, 8 * whole.distance(again))
        off, factor = whole.distance(parts), parts.best_scale(whole)
        yield judged(
            "SE",
            f"{self.what} of {split} rows",
            f"gradient off by {off:.2g} (best factor {factor:.3g})",
            f"≤ {room:.1g}",
            off <= room and whole.norm() > 0,
            "Cut into uneven parts, the batch gives another gradient: a mean of means, a division that is missing or "
            "done twice, gradients cleared between the parts, or only the last part counts.",
        )

    def _room(self, whole: Gradient) -> float:
        """From the dtype and the problem, as for a ``Step``: how well this gradient is conditioned."""
        floating = [p for p in self.model.parameters() if p.requires_grad]
        rng = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for p in floating:
                side = torch.randn(p.shape, generator=rng).sign().to(p.device, p.dtype)
                p.add_(p.abs() * torch.finfo(p.dtype).eps * side)
        floor = whole.distance(self._gradient([self.batch]))
        return min(0.5, 16 * max(floor, 4 * max(torch.finfo(p.dtype).eps for p in floating)))

    def _gradient(self, batches: Sequence[Mapping[str, Any]]) -> Gradient:
        for p in self.model.parameters():
            p.grad = None
        with seeded(self.seed), torch.enable_grad():
            self.accumulate(self.model, [fresh(b) for b in batches])
        found = {
            n: None if p.grad is None else p.grad.detach().clone()
            for n, p in self.model.named_parameters()
            if p.requires_grad
        }
        return Gradient(found)


LAW = Law(
    code="SE",
    name="accumulation (Accumulation)",
    sentence="Many small backward passes, or many ranks, leave the whole batch's gradient.",
    needs="accumulate(model, batches) and a batch",
    how="The batch in one piece and cut unevenly; the tolerance is 16 times what one unit in the last place does.",
    traps="Even cuts hide a mean of means.",
    caught="transformers gradient accumulation (a mean of means), gradients cleared between requests",
    check=Accumulation.check,
)


def _uneven(rows: int) -> list[int]:
    first = max(1, rows // 4)
    return [first, rows - first] if rows > 1 else [1]


def _cut(batch: Mapping[str, Any], rows: int, split: Sequence[int]) -> Iterator[dict[str, Any]]:
    start = 0
    for size in split:
        part = slice(start, start + size)
        yield {k: v[part] if isinstance(v, Tensor) and v.ndim and v.shape[0] == rows else v for k, v in batch.items()}
        start += size
