"""EVA, arXiv 2410.07170:  LoRA whose A starts at the top-r right singular vectors of the layer's inputs; B = 0.

The directions are eigenvectors of Σ x xᵀ over the calibration tokens (padding left out, not centred, one rank for all
layers). If the tokens span fewer than r directions, the rest is a random orthonormal complement, so every row is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.adapters.errors import AdapterError
from earnest.adapters.layer import Layer
from earnest.adapters.variant import Initialization, Variant, register
from earnest.adapters.variants.lora import LoRA


def top_directions(c: Float[Tensor, "n n"], k: int, rng: torch.Generator) -> Float[Tensor, "k n"]:
    """k orthonormal rows: the top eigenvectors of c, completed at random beyond its rank."""
    values, vectors = torch.linalg.eigh(c.double().cpu())
    order = values.argsort(descending=True)[:k]
    kept = vectors[:, order][:, values[order] > 1e-7 * values.max()]  # smaller values are rounding errors of fp32 sums
    fill = torch.randn(c.shape[0], k - kept.shape[1], generator=rng, dtype=torch.float64)
    for _ in range(2):  # two passes give orthogonality to the last digit
        fill = fill - kept @ (kept.t() @ fill)
    basis = torch.cat([kept, torch.linalg.qr(fill).Q], 1)
    return basis.t().float()


@register
@dataclass(frozen=True)
class EVA(LoRA):
    """LoRA aligned with the activations of calibration data."""

    name = "eva"
    experts = Variant.experts  # no form for them
    paper = "2410.07170"
    reference = "float64 SVD of the inputs; peft LoraConfig for the trained adapter"
    equation = "y = Wx + b + (α/r)·B A x,  A₀ = top right singular vectors of the inputs"
    lr = 1e-4
    lr_source = "as LoRA; B's first gradient is larger because A is aligned with the inputs"
    examples: ClassVar = {"eva": {"rank": 4}}

    def wants_calibration(self) -> bool:
        return True

    def check(self, layer: Layer) -> None:
        if self.rank > layer.n:
            raise AdapterError(
                f"eva: rank {self.rank} exceeds the {layer.n} inputs of {layer.name}; choose rank ≤ {layer.n}."
            )

    def initial(self, layer: Layer, ctx: Initialization) -> dict[str, Tensor]:
        return {"A": top_directions(ctx.moments[layer.name], self.rank, ctx.rng)}

    @classmethod
    def from_peft_config(cls, config: Any) -> Variant | None:
        return None  # a trained EVA is a LoRA on disk
