"""What a guard is held against: the same guard with directions that mean nothing, and update noise of the same size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from earnest.guards.directions import Directions
from earnest.guards.errors import GuardError
from earnest.guards.guard import DirectionGuard, Erase, Route


def random_directions(like: Directions, seed: int) -> Directions:
    """As many directions in the same modules, uniform at random."""
    rng = torch.Generator().manual_seed(seed)
    basis = {
        n: torch.linalg.qr(torch.randn(V.shape[::-1], generator=rng, dtype=torch.float64)).Q.t().float().contiguous()
        for n, V in like.basis.items()
    }
    return Directions(basis, like.strength, source="a random generator")


def shuffled_directions(like: Directions, seed: int) -> Directions:
    """The same numbers at other places: each module's coordinates in a random order."""
    rng = torch.Generator().manual_seed(seed)
    basis = {n: V[:, torch.randperm(V.shape[1], generator=rng)] for n, V in like.basis.items()}
    return Directions(basis, like.strength, source=f"{like.source}, shuffled")


class _Noise(DirectionGuard):
    """Update noise: takes, instead of the unwanted part, a random vector of its length out of the step.

    ``settings`` are those of the guard that it stands in for (gate, overshoot, …) and decide the length. The noise of
    an update is a function of ``seed`` and the count of updates, so a resumed run repeats it.
    """

    def __init__(self, directions: Directions, *, seed: int = 0, **settings: Any) -> None:
        super().__init__(directions, **settings)
        if self.at != "update":
            raise GuardError(f"at={self.at!r}: this noise is matched to what is taken from an update; use at='update'.")
        self.seed = seed

    def take(self, name: str, step: Tensor, V: Tensor) -> Tensor:
        size = self.rule.removed(step, V).norm()
        place = list(self._parameters).index(name)
        rng = torch.Generator().manual_seed((self.seed * 1_000_003 + self.updates) * 10_007 + place)
        noise = torch.randn(step.shape, generator=rng, dtype=torch.float64).to(step.device)
        return noise * (size / noise.norm())


class Perturb(_Noise, Erase):
    """Matched noise in every update, as much as ``Erase`` would have taken out."""


class PerturbRoute(_Noise, Route):
    """Matched noise in the quarantine, as much as ``Route`` would have put there."""
