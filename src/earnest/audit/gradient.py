"""A gradient as one vector, and the few questions that the laws ask of it. Sums are taken in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Gradient:
    """∂loss/∂p by parameter name; a parameter that the loss does not reach has None."""

    parts: Mapping[str, Tensor | None]

    def norm(self) -> float:
        return math.sqrt(self.dot(self))

    def dot(self, other: Gradient) -> float:
        total = 0.0
        for name, mine in self.parts.items():
            theirs = other.parts[name]
            if mine is not None and theirs is not None:
                total += float(torch.dot(mine.double().flatten(), theirs.double().flatten()))
        return total

    def finite(self) -> bool:
        return all(bool(torch.isfinite(g).all()) for g in self.parts.values() if g is not None)

    def distance(self, other: Gradient) -> float:
        """‖self - other‖ over the larger of the two norms; 0 where both are 0."""
        scale = max(self.norm(), other.norm())
        return self.minus(other).norm() / scale if scale > 0 else 0.0

    def minus(self, other: Gradient, factor: float = 1.0) -> Gradient:
        return self.plus(other, -factor)

    def plus(self, other: Gradient, factor: float = 1.0) -> Gradient:
        """self + factor·other, in float64."""
        parts: dict[str, Tensor | None] = {}
        for name, mine in self.parts.items():
            theirs = other.parts[name]
            if mine is None or theirs is None:
                parts[name] = theirs.double() * factor if theirs is not None else mine
            else:
                parts[name] = mine.double() + theirs.double() * factor
        return Gradient(parts)

    def times(self, factor: float) -> Gradient:
        return Gradient({n: None if g is None else g * factor for n, g in self.parts.items()})

    def best_scale(self, other: Gradient) -> float:
        """The c that brings c·other nearest to self."""
        square = other.dot(other)
        return self.dot(other) / square if square > 0 else 0.0


def span_residual(target: Gradient, a: Gradient, b: Gradient) -> tuple[float, float, float]:
    """(α, β, ‖target - αa - βb‖/‖target‖) for the best α, β."""
    aa, ab, bb, ta, tb = a.dot(a), a.dot(b), b.dot(b), target.dot(a), target.dot(b)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * max(aa * bb, 1e-300):  # a and b are parallel: any split of the weight is as good
        alpha, beta = target.best_scale(a), 0.0
    else:
        alpha, beta = (ta * bb - tb * ab) / determinant, (tb * aa - ta * ab) / determinant
    rest = target.minus(a, alpha).minus(b, beta)
    norm = target.norm()
    return alpha, beta, rest.norm() / norm if norm > 0 else 0.0
