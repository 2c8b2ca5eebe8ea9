"""HRA, arXiv 2405.17484:  y = W R x + b,  R = H_1 … H_r,  H_i = I − 2 û_i û_iᵀ.

The product of reflections in WY form: R = I − Ûᵀ C with C = (striu(Û Ûᵀ) + ½ I)⁻¹ Û, one triangular solve. The rows
start as equal pairs, for which R = I; U = U₀ + δU is trained as an offset. The rounding error of the paired start
is subtracted,

    ΔW = −W [(Û − Û₀)ᵀ C + Û₀ᵀ (C − C₀)],

so ΔW is exactly 0 at initialization: a LoRA of rank 2r. W Ûᵀ runs as r tokens through the base's kernel. ‖u‖ = 1 at
initialization, so the learning rate is an angle. Only the direction of u matters, so there is no weight decay. The two
members of a pair get opposite gradients that are not 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.adapters.kernel import Factors
from earnest.adapters.layer import Layer
from earnest.adapters.variant import Initialization, Spec, Tensors, Variant, register
from earnest.adapters.variants.lora import check_fits
from earnest.settings import setting


def _unit(u: Float[Tensor, "r n"]) -> Float[Tensor, "r n"]:
    return u / u.norm(dim=1, keepdim=True).clamp_min(1e-12)


def _wy(u: Float[Tensor, "r n"]) -> Float[Tensor, "r n"]:
    """C with H_1 … H_r = I − uᵀ C, for unit rows u."""
    m = (u @ u.t()).triu(1) + 0.5 * torch.eye(u.shape[0], dtype=u.dtype, device=u.device)
    return torch.linalg.solve_triangular(m, u, upper=True)


@register
@dataclass(frozen=True)
class HRA(Variant):
    """A chain of Householder reflections before the weight."""

    rank: int = setting(8, "r, the number of reflections; even, because they start as pairs", at_least=2, multiple_of=2)

    name = "hra"
    paper = "2405.17484"
    reference = "peft HRAConfig"
    equation = "y = W (∏ᵢ I − 2ûᵢûᵢᵀ) x + b"
    lr = 1e-3
    lr_source = "an angle: ‖u‖ = 1 at initialization, so one AdamW step turns u by about lr·√n"
    reads_base = True
    peft_type = "HRA"
    peft_names: ClassVar = {"dU": "hra_u"}
    examples: ClassVar = {"hra": {"rank": 4}}

    def check(self, layer: Layer) -> None:
        check_fits(self.rank, self.name, layer)

    def specs(self, layer: Layer) -> dict[str, Spec]:
        u = (self.rank, layer.n)
        return {"dU": Spec(u), "U0": Spec(u, trainable=False), "WU0": Spec((layer.m, self.rank), trainable=False)}

    def initial(self, layer: Layer, ctx: Initialization) -> dict[str, Tensor]:
        half = _unit(torch.randn(self.rank // 2, layer.n, generator=ctx.rng))
        return self._start(layer, half)

    @staticmethod
    def _start(layer: Layer, half: Tensor) -> dict[str, Tensor]:
        u0 = half.repeat_interleave(2, dim=0).to(layer.device)
        return {"U0": u0, "WU0": layer.rows(_unit(u0)).float().t()}

    def factors(self, t: Tensors, layer: Layer, scale: float) -> Factors:
        u = _unit(t["U0"] + t["dU"])
        with torch.no_grad():
            u0 = _unit(t["U0"])
            c0 = _wy(u0)
        c = _wy(u)
        moved = layer.rows(u - u0).to(u.dtype).t()
        return Factors(torch.cat([c, c - c0]), torch.cat([moved, t["WU0"]], 1), -scale)

    def no_decay(self) -> frozenset[str]:
        return frozenset({"dU"})

    def portable_rank(self, layer: Layer) -> int | None:
        return 2 * self.rank

    def peft_config(self) -> dict[str, Any] | None:
        return {"r": self.rank, "apply_GS": False, "bias": "none"}

    def to_peft(self, t: Tensors, layer: Layer) -> dict[str, Tensor]:
        return {"hra_u": (t["U0"] + t["dU"]).t()}

    @classmethod
    def from_peft_config(cls, config: Mapping[str, Any]) -> Variant | None:
        return HRA(int(config["r"]))

    def from_peft(self, layer: Layer, tensors: Tensors, shared: Tensors) -> dict[str, Tensor]:
        u = _unit(tensors["hra_u"].t())  # only directions matter
        start = self._start(layer, u[::2])  # the initial term is 0 for any pairs
        return start | {"dU": u - start["U0"]}
