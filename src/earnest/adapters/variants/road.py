"""RoAd, arXiv 2409.00119:  y' = R y in planes (i, i + g/2) of groups of g outputs:

    y' = α cos θ ∘ y + α sin θ ∘ rotate_half(y).

θ = 0 and α = 1 + δ, δ = 0 at initialization. It is computed as

    y' = y + e₁ ∘ y + e₂ ∘ rotate_half(y),  e₁ = δ cos θ − 2 sin²(θ/2),  e₂ = (1 + δ) sin θ,

so the identity is exact. ``kind``: road_1 has one (θ, α) per plane, road_2 one per output, road_4 two per output. The
bias is rotated too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.adapters.errors import AdapterError
from earnest.adapters.gains import turned
from earnest.adapters.layer import Layer
from earnest.adapters.runtime import cached
from earnest.adapters.variant import Spec, Tensors, Variant, WeightAndBias, register
from earnest.settings import setting

_SIZE = {"road_1": 0.5, "road_2": 1, "road_4": 2}


@register
@dataclass(frozen=True)
class ROAD(Variant):
    """Rotations and gains of the outputs, in planes."""

    kind: str = setting(
        "road_1",
        "one (θ, α) per plane (road_1), one per output (road_2), or two per output (road_4)",
        choices=tuple(_SIZE),
    )
    group: int = setting(
        64, "outputs per group; output i is rotated with output i + group/2", at_least=2, multiple_of=2
    )

    name = "road"
    paper = "2409.00119"
    reference = "peft RoadConfig"
    equation = "y = α cosθ∘(Wx+b) + α sinθ∘rotate_half(Wx+b)"
    lr = 1e-3
    lr_source = "PEFT's MetaMathQA comparison (38.5 % at 1e-3, road_2)"
    peft_type = "ROAD"
    peft_names: ClassVar = {"theta": "road_theta", "dalpha": "road_alpha"}
    examples: ClassVar = {
        "road": {"group": 8},
        "road_2": {"kind": "road_2", "group": 8},
        "road_4": {"kind": "road_4", "group": 8},
    }

    def check(self, layer: Layer) -> None:
        if layer.m % self.group:
            raise AdapterError(
                f"road: group {self.group} does not divide the {layer.m} outputs of {layer.name}; choose a divisor."
            )

    def specs(self, layer: Layer) -> dict[str, Spec]:
        size = int(layer.m * _SIZE[self.kind])
        return {"theta": Spec((size,)), "dalpha": Spec((size,))}

    def columns(self, t: Tensors, scale: float) -> tuple[Float[Tensor, "G p h"], Float[Tensor, "G p h"]]:
        """(e₁, e₂) in fp32 by group and half (p = 1: the same for both), without cancellation near the identity."""
        theta, d, half = t["theta"], t["dalpha"], self.group // 2
        if self.kind == "road_4":
            (theta1, theta2), (d1, d2) = (v.view(-1, 2, 2, half).unbind(1) for v in (theta, d))
        else:
            theta1 = theta2 = theta.view(-1, 1 if self.kind == "road_1" else 2, half)
            d1 = d2 = d.view_as(theta1)
        e1 = d1 * theta1.cos() - 2 * (theta1 / 2).sin().square()
        return scale * e1, scale * ((1 + d2) * theta2.sin())

    def after(self, t: Tensors, y: Tensor, layer: Layer, scale: float) -> Tensor:
        if torch.is_grad_enabled():
            return turned(y, *self.columns(t, scale))
        return turned(y, *cached(layer, "road", t, scale, lambda: torch.stack(self.columns(t, scale))))

    def weight(self, t: Tensors, layer: Layer, w: Tensor, b: Tensor | None, scale: float) -> WeightAndBias:
        e1, e2 = self.columns(t, scale)
        return turned(w.t(), e1, e2).t().contiguous(), None if b is None else turned(b, e1, e2)

    def peft_config(self) -> dict[str, Any] | None:
        return {"variant": self.kind, "group_size": self.group}

    def to_peft(self, t: Tensors, layer: Layer) -> dict[str, Tensor]:
        return {"road_theta": t["theta"], "road_alpha": 1 + t["dalpha"]}

    @classmethod
    def from_peft_config(cls, config: Mapping[str, Any]) -> Variant | None:
        return ROAD(config.get("variant", "road_1"), int(config.get("group_size", 64)))

    def from_peft(self, layer: Layer, tensors: Tensors, shared: Tensors) -> dict[str, Tensor]:
        return {"theta": tensors["road_theta"], "dalpha": tensors["road_alpha"] - 1}
