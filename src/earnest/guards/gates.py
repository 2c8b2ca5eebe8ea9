"""The part of a step that is removed, for one module. V [k, n] has orthonormal rows that point toward the unwanted.

    c = V w,   removed = o · a(c) V,   kept = w - removed        w: the descent direction, -u of a step u, or a gradient

    one_sided   a(c) = max(c, 0)   removes only motion toward the unwanted
    two_sided   a(c) = c           kept has no component in span(V) at o = 1
    reverse     a(c) = 2c          flips the component: V kept = -V w at o = 1

``preserve`` scales kept to the length of w; then the difference to w is not in span(V) alone. Shapes: k directions, n
numbers of a module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from jaxtyping import Float
from torch import Tensor

from earnest.errors import EarnestError
from earnest.guards.errors import GuardError
from earnest.settings import Checked, setting

Gate = Literal["one_sided", "two_sided", "reverse"]
GATES: tuple[Gate, ...] = get_args(Gate)
At = Literal["update", "gradient"]


def whole(value: Tensor) -> Tensor:
    """The sum over the ranks if this process has all numbers: the value itself."""
    return value


@dataclass(frozen=True)
class Rule(Checked):
    """How much of the unwanted component is removed, where, and how often its directions are extracted again."""

    error: ClassVar[type[EarnestError]] = GuardError

    gate: Gate = setting(
        "one_sided",
        "one_sided: remove the component only when it points toward the unwanted direction; two_sided: always; "
        "reverse: flip its sign",
    )
    overshoot: float = setting(1.0, "1 removes the component; more than 1 reverses part of it", above=0.0)
    preserve: bool = setting(False, "scale what is kept back to the length of the update")
    at: At = setting(
        "update",
        "apply the guard to the optimizer's update (recommended) or to the gradient (as published; AdamW reintroduces "
        "the removed component)",
    )
    every: int = setting(0, "extract the directions again after every N updates; 0: never", at_least=0)
    min_overlap: float = setting(
        0.25, "directions that overlap less with the previous ones are not adopted", at_least=0.0, at_most=1.0
    )

    def removed(
        self, w: Float[Tensor, " n"], V: Float[Tensor, "k n"], total: Callable[[Tensor], Tensor] = whole
    ) -> Float[Tensor, " n"]:
        """The part of ``w`` that is removed. ``total``: the sum over the ranks, if each has some of the n numbers."""
        part = self.overshoot * (2 if self.gate == "reverse" else 1) * (self.unwanted(w, V, total) @ V)
        if not self.preserve:
            return part
        kept = w - part
        before, length = (total(x.square().sum()).sqrt() for x in (w, kept))
        return w - kept * (before / length) if float(length) > 0 else part

    def unwanted(
        self, w: Float[Tensor, " n"], V: Float[Tensor, "k n"], total: Callable[[Tensor], Tensor] = whole
    ) -> Float[Tensor, " k"]:
        """The coordinates of ``w`` that this gate removes."""
        c = total(V @ w)
        return c.clamp_min(0) if self.gate == "one_sided" else c
