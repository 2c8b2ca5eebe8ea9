"""What is taken out of a step, for one module. V [k, n] has orthonormal rows that point at what is unwanted.

    c = V w,   removed = o · a(c) V,   kept = w - removed        w: the descent direction, -u of a step u, or a gradient

    one_sided   a(c) = max(c, 0)   only motion toward the unwanted goes
    two_sided   a(c) = c           kept has no component in span(V) at o = 1
    reverse     a(c) = 2c          the component is turned round: V kept = -V w at o = 1

``preserve`` scales kept back to w's length; what it then lacks is no longer in span(V) alone. Shapes: k directions, n
numbers of a module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from jaxtyping import Float
from torch import Tensor

from earnest.errors import nearest
from earnest.guards.errors import GuardError

Gate = Literal["one_sided", "two_sided", "reverse"]
GATES: tuple[Gate, ...] = get_args(Gate)


@dataclass(frozen=True)
class Rule:
    """How much of the unwanted component goes."""

    gate: Gate = "one_sided"
    overshoot: float = 1.0
    preserve: bool = False

    def __post_init__(self) -> None:
        if self.gate not in GATES:
            raise GuardError(f"gate {self.gate!r} is unknown: {nearest(str(self.gate), GATES)}")
        if not (math.isfinite(self.overshoot) and self.overshoot > 0):
            raise GuardError(
                f"overshoot is {self.overshoot}; 1 removes the component, more turns it round; give a number above 0."
            )

    def removed(self, w: Float[Tensor, " n"], V: Float[Tensor, "k n"]) -> Float[Tensor, " n"]:
        """The part of ``w`` that goes."""
        part = self.overshoot * (self._amount(V @ w) @ V)
        if not self.preserve:
            return part
        kept = w - part
        length = kept.norm()
        return w - kept * (w.norm() / length) if float(length) > 0 else part

    def unwanted(self, w: Float[Tensor, " n"], V: Float[Tensor, "k n"]) -> Float[Tensor, " k"]:
        """The coordinates of ``w`` that this gate is there to prevent."""
        c = V @ w
        return c.clamp_min(0) if self.gate == "one_sided" else c

    def _amount(self, c: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
        if self.gate == "one_sided":
            return c.clamp_min(0)
        return c if self.gate == "two_sided" else 2 * c
