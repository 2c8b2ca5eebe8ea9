"""Reused memory for elementwise operations.

A new tensor of a megabyte costs more in page faults than the exponentials that fill it. So the formulas have an ``out``
for every intermediate result: a reused buffer in the fused pass, ``None`` (a new tensor, for autograd) elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Buffers for one block of rows at a time; ``clear`` makes all of them free again."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._elements, self._dtype, self._device = elements, dtype, device
        self._buffers: list[Tensor] = []
        self._used = 0

    def clear(self) -> None:
        self._used = 0

    def __call__(self, like: Tensor) -> Tensor | None:
        """A free buffer of ``like``'s shape; a new tensor if it is small, which is cheaper."""
        if like.numel() * 8 < self._elements:
            return None
        assert like.numel() <= self._elements and like.dtype == self._dtype
        if self._used == len(self._buffers):
            self._buffers.append(torch.empty(self._elements, dtype=self._dtype, device=self._device))
        self._used += 1
        return self._buffers[self._used - 1][: like.numel()].view(like.shape)

    def over(self, spent: Tensor) -> Tensor | None:
        """``spent`` itself, whose values are no longer needed."""
        return spent


class Fresh(Scratch):
    """No reuse: every result is a new tensor."""

    def __init__(self) -> None:
        super().__init__(0, torch.float32, torch.device("cpu"))

    def __call__(self, like: Tensor) -> None:
        return None

    def over(self, spent: Tensor) -> None:
        return None


FRESH = Fresh()
