"""A training job of a few numbers, for the outer loop's tests: nothing here knows of replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class ToyEngine:
    """Least squares from data of its own; the parts of an engine that an outer hook may touch."""

    def __init__(self, replica: int = 0, sizes: tuple[int, ...] = (7, 5), lr: float = 0.05, guard: Any = None) -> None:
        born = torch.Generator().manual_seed(1)
        self.parameters = [nn.Parameter(torch.randn(n, generator=born)) for n in sizes]
        self.names = [f"layer{i}.A" for i in range(len(sizes))]
        self.guard, self.outer = guard, None
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr)
        self.replica, self.version, self.tokens = replica, 0, 0

    def loss(self, step: int) -> Tensor:
        data = torch.Generator().manual_seed(1000 * self.replica + step)
        total = torch.zeros(())
        for i, p in enumerate(self.parameters):
            x = torch.randn(4, p.numel(), generator=data)
            total = total + (x @ p - x.sum(1) * (i + 1)).square().mean()
        return total

    def step(self, tokens: int = 16) -> Mapping[str, float]:
        """One update on the data of step ``version``."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(self.version).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.version += 1
        self.tokens += tokens
        return self.outer.after_update(self) if self.outer else {}

    def flat(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.parameters])
