"""Optimizers as frozen descriptions; ``build`` makes the real ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from earnest.errors import ConfigError


def _check(owner: str, **limits: tuple[float, float, float]) -> None:
    for name, (value, low, high) in limits.items():
        if not low <= value < high:
            raise ConfigError(f"{owner}.{name} is {value}; it must be in [{low}, {high}).")


Parameters = Sequence[torch.nn.Parameter]


def _groups(decayed: Parameters, plain: Parameters, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, of which the second never decays; an empty one is left out."""
    groups = [{"params": list(decayed), "weight_decay": weight_decay}, {"params": list(plain), "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv 1711.05101). ``weight_decay`` pulls toward the base: adapter parameters are offsets from it."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        inf = float("inf")
        _check(
            "AdamW",
            lr=(self.lr, 0.0, inf),
            beta1=(self.betas[0], 0.0, 1.0),
            beta2=(self.betas[1], 0.0, 1.0),
            eps=(self.eps, 0.0, inf),
            weight_decay=(self.weight_decay, 0.0, inf),
        )

    def build(self, decayed: Parameters, plain: Parameters) -> torch.optim.Optimizer:
        return torch.optim.AdamW(_groups(decayed, plain, self.weight_decay), lr=self.lr, betas=self.betas, eps=self.eps)


@dataclass(frozen=True)
class SGD:
    """Plain gradient descent with optional momentum; the optimizer under which update laws are easiest to read."""

    lr: float = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        inf = float("inf")
        _check(
            "SGD",
            lr=(self.lr, 0.0, inf),
            momentum=(self.momentum, 0.0, 1.0),
            weight_decay=(self.weight_decay, 0.0, inf),
        )

    def build(self, decayed: Parameters, plain: Parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(_groups(decayed, plain, self.weight_decay), lr=self.lr, momentum=self.momentum)


Optimizer = AdamW | SGD
