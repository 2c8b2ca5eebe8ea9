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
from earnest.audit.probe import fresh, restored, seeded
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
    tolerance: float = 1e-3
    seed: int = 0

    def check(self) -> Iterator[Finding]:
        sizes = [v.shape[0] for v in self.batch.values() if isinstance(v, Tensor) and v.ndim]
        rows = max(set(sizes), key=sizes.count)
        split = list(self.split) if self.split is not None else _uneven(rows)
        with restored(self.model, None):
            whole, again = self._gradient([self.batch]), self._gradient([self.batch])
            parts = self._gradient(list(_cut(self.batch, rows, split)))
        noise = whole.distance(again)
        off, factor = whole.distance(parts), parts.best_scale(whole)
        room = max(self.tolerance, 8 * noise)
        yield judged(
            "SE",
            f"{self.what} of {split} rows",
            f"gradient off by {off:.2g} (best factor {factor:.3g})",
            f"≤ {room:.1g}",
            off <= room and whole.norm() > 0,
            "Cut into uneven parts, the batch gives another gradient: a mean of means, a division that is missing or "
            "done twice, gradients cleared between the parts, or only the last part counts.",
        )

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


def _uneven(rows: int) -> list[int]:
    first = max(1, rows // 4)
    return [first, rows - first] if rows > 1 else [1]


def _cut(batch: Mapping[str, Any], rows: int, split: Sequence[int]) -> Iterator[dict[str, Any]]:
    start = 0
    for size in split:
        part = slice(start, start + size)
        yield {k: v[part] if isinstance(v, Tensor) and v.ndim and v.shape[0] == rows else v for k, v in batch.items()}
        start += size
