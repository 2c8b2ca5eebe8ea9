"""Controls for a guard: the same guard with meaningless directions, and update noise of the same size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from earnest.engines.trained import part_of
from earnest.guards.directions import Directions
from earnest.guards.errors import GuardError
from earnest.guards.guard import DirectionGuard, Erase, Route


def random_directions(like: Directions, seed: int) -> Directions:
    """The same number of directions in the same modules, uniform at random."""
    rng = torch.Generator().manual_seed(seed)
    basis = {
        n: torch.linalg.qr(torch.randn(V.shape[::-1], generator=rng, dtype=torch.float64)).Q.t().float().contiguous()
        for n, V in like.basis.items()
    }
    return Directions(basis, like.strength, source="a random generator")


def shuffled_directions(like: Directions, seed: int) -> Directions:
    """The same directions with each module's coordinates in a random order."""
    rng = torch.Generator().manual_seed(seed)
    basis = {n: V[:, torch.randperm(V.shape[1], generator=rng)] for n, V in like.basis.items()}
    return Directions(basis, like.strength, source=f"{like.source}, shuffled")


class _Noise(DirectionGuard):
    """Remove a random vector from the step that is as long as the unwanted part. ``settings`` are those of the guard
    that it replaces (gate, overshoot, …); they determine the length. The noise is a function of ``seed`` and the number
    of the update, so a resumed run has the same noise."""

    def __init__(self, directions: Directions, *, seed: int = 0, **settings: Any) -> None:
        super().__init__(directions, **settings)
        if self.at != "update":
            raise GuardError(
                f"at={self.at!r}: this noise has the length of the part removed from an update; use at='update'."
            )
        self.seed = seed

    def take(self, name: str, step: Tensor, V: Tensor) -> Tensor:
        total, held = self._total(name), self._held[name]
        size = total(self.rule.removed(step, V, total).square().sum()).sqrt()
        place = list(self._held).index(name)
        rng = torch.Generator().manual_seed((self.seed * 1_000_003 + self.updates) * 10_007 + place)
        noise = torch.randn(held.numel(), generator=rng, dtype=torch.float64).to(step.device)
        return part_of((noise * (size / noise.norm())).view(held.shape), held).flatten()


class Perturb(_Noise, Erase):
    """Noise in every update, of the length that ``Erase`` would remove."""


class PerturbRoute(_Noise, Route):
    """Noise in the quarantine, of the length that ``Route`` would put there."""
