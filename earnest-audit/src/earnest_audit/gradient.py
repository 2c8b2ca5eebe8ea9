"""A gradient as one vector, with the operations that the laws need. Sums are taken in float64."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
            if mine is not None and (theirs := other.parts[name]) is not None:
                total += float(torch.dot(mine.double().flatten(), theirs.double().flatten()))
        return total

    def cosine(self, other: Gradient) -> float:
        return self.dot(other) / max(self.norm() * other.norm(), 1e-300)

    def finite(self) -> bool:
        return all(bool(torch.isfinite(g).all()) for g in self.parts.values() if g is not None)

    def distance(self, other: Gradient) -> float:
        """‖self - other‖ over the larger of the two norms; 0 where both are 0, infinite where one is not finite."""
        mine, theirs = self.norm(), other.norm()
        if not (math.isfinite(mine) and math.isfinite(theirs)):
            return math.inf
        scale = max(mine, theirs)
        return self.minus(other).norm() / scale if scale > 0 else 0.0

    def minus(self, other: Gradient, factor: float = 1.0) -> Gradient:
        return self.plus(other, -factor)

    def plus(self, other: Gradient, factor: float = 1.0) -> Gradient:
        """self + factor·other, in float64."""
        parts: dict[str, Tensor | None] = {}
        for name, mine in self.parts.items():
            if (theirs := other.parts[name]) is None:
                parts[name] = mine
            else:
                parts[name] = theirs.double() * factor + (0.0 if mine is None else mine.double())
        return Gradient(parts)

    def times(self, factor: float) -> Gradient:
        return Gradient({n: None if g is None else g * factor for n, g in self.parts.items()})

    def only(self, names: Iterable[str]) -> Gradient:
        return Gradient({n: self.parts[n] for n in names})

    def best_scale(self, other: Gradient) -> float:
        """The c that brings c·other nearest to self."""
        square = other.dot(other)
        return self.dot(other) / square if square > 0 else 0.0


@dataclass(frozen=True)
class Span:
    """target ≈ α·a + β·b for the best α, β. ``rest`` is what is left, over the longest of the three.

    ``angle`` is the sine between a and b: a relative error e of the target moves α by up to e·‖target‖/(‖a‖·angle).
    ``lengths`` are ‖a‖/‖target‖ and ‖b‖/‖target‖.
    """

    alpha: float
    beta: float
    rest: float
    angle: float
    lengths: tuple[float, float]

    def within(self, error: float) -> bool:
        """Whether the target is such a combination with weights ≥ 0, up to a relative ``error`` of the gradients."""
        room = error / max(self.angle, 1e-300)
        parts = (self.alpha * self.lengths[0], self.beta * self.lengths[1])
        return self.rest <= error and all(part >= -room * max(1.0, *map(abs, parts)) for part in parts)


def span(target: Gradient, a: Gradient, b: Gradient) -> Span:
    """The target as a combination of two gradients."""
    aa, ab, bb, ta, tb = a.dot(a), a.dot(b), b.dot(b), target.dot(a), target.dot(b)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * max(aa * bb, 1e-300):  # parallel, or one of them is 0: any split of the weight is as good
        alpha, beta, angle = (target.best_scale(a), 0.0, 0.0) if aa >= bb else (0.0, target.best_scale(b), 0.0)
    else:
        alpha, beta = (ta * bb - tb * ab) / determinant, (tb * aa - ta * ab) / determinant
        angle = math.sqrt(determinant / (aa * bb))
    norm = target.norm()
    if norm == 0:
        return Span(alpha, beta, 0.0 if aa == bb == 0 else 1.0, angle, (0.0, 0.0))
    lengths = (math.sqrt(aa) / norm, math.sqrt(bb) / norm)
    longest = max(1.0, abs(alpha) * lengths[0], abs(beta) * lengths[1])  # parts that cancel are as exact as they are
    rest = target.minus(a, alpha).minus(b, beta).norm() / (norm * longest)
    return Span(alpha, beta, rest, angle, lengths)


def nodes(root: Any, ends: Collection[Any] = ()) -> Iterator[Any]:
    """Every node of autograd's graph from ``root`` (a ``grad_fn``) on, once, without what is behind ``ends``."""
    seen, todo = {None}, [root]
    while todo:
        if (node := todo.pop()) not in seen:
            seen.add(node)
            yield node
            todo += [] if node in ends else [following for following, _ in node.next_functions]
