"""OFT, arXiv 2306.07280 (input-side as in OFTv2, arXiv 2506.19847):  y = W Rᵀ x + b,  R block-diagonal orthogonal.

R = (I − Q)⁻¹(I + Q) with Q skew in blocks, Q = 0 at initialization. x' = x + x (R − I) with R − I = (I − Q)⁻¹ 2Q solved
exactly, so the identity is exact and R is orthogonal at any size (PEFT's default is a truncated series of this R; its
exact branch is the transpose, so Q changes sign on the way to and from such a file).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.adapters.errors import AdapterError
from earnest.adapters.layer import Layer
from earnest.adapters.linalg import cayley_minus_identity, skew
from earnest.adapters.runtime import cached
from earnest.adapters.variant import Spec, Tensors, Variant, WeightAndBias, register
from earnest.settings import setting

SERIES_TOLERANCE = 1e-4


def _series(q: Float[Tensor, "g b b"], terms: int) -> Float[Tensor, "g b b"]:
    """PEFT's truncated series of R: I + 2Q + 2Q² + … + Qᵗ⁻¹ (the last power once)."""
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device).expand_as(q)
    total, power = eye.clone(), eye
    for i in range(1, terms):
        power = power @ q
        last = i == terms - 1 and terms > 2
        total = total + (power if last else 2 * power)
    return total


@register
@dataclass(frozen=True)
class OFT(Variant):
    """Orthogonal rotation of the inputs, in blocks."""

    block: int = setting(32, "inputs per block of the rotation", at_least=2)

    name = "oft"
    paper = "2306.07280"
    reference = "peft OFTConfig(use_cayley_neumann=False)"
    equation = "y = W Rᵀ x + b,  R = (I−Q)⁻¹(I+Q) in blocks"
    lr = 1e-4
    lr_source = "PEFT's MetaMathQA comparison (49.1 % at 1e-4)"
    peft_type = "OFT"
    peft_names: ClassVar = {"q": "oft_R.weight"}
    examples: ClassVar = {"oft": {"block": 8}}

    def check(self, layer: Layer) -> None:
        if layer.n % self.block:
            raise AdapterError(
                f"oft: block {self.block} does not divide the {layer.n} inputs of {layer.name}; choose a divisor."
            )

    def specs(self, layer: Layer) -> dict[str, Spec]:
        return {"q": Spec((layer.n // self.block, self.block * (self.block - 1) // 2))}

    def _off(self, t: Tensors, scale: float) -> Float[Tensor, "g b b"]:
        """c·(R − I)."""
        return scale * cayley_minus_identity(skew(t["q"], self.block))

    def before(self, t: Tensors, x: Tensor, layer: Layer, scale: float) -> Tensor:
        keep = torch.is_grad_enabled()
        off = self._off(t, scale) if keep else cached(layer, "oft", t, scale, lambda: self._off(t, scale))
        shaped = x.reshape(-1, off.shape[0], self.block)
        if x.dtype == torch.float32:  # 1·x + 0·… is x, so the identity is exact without a separate sum
            off = off + torch.eye(self.block, device=off.device)
            return torch.einsum("ngk,gkc->ngc", shaped, off).reshape(x.shape)
        return x + torch.einsum("ngk,gkc->ngc", shaped, off.to(x.dtype)).reshape(x.shape)

    def weight(self, t: Tensors, layer: Layer, w: Tensor, b: Tensor | None, scale: float) -> WeightAndBias:
        off = self._off(t, scale)
        shaped = w.view(w.shape[0], off.shape[0], self.block)
        return w + torch.einsum("mgc,gkc->mgk", shaped, off).reshape(w.shape), b

    def peft_config(self) -> dict[str, Any] | None:
        return {
            "r": 0,
            "oft_block_size": self.block,
            "use_cayley_neumann": False,
            "module_dropout": 0.0,
            "bias": "none",
        }

    def to_peft(self, t: Tensors, layer: Layer) -> dict[str, Tensor]:
        return {"oft_R.weight": -t["q"]}

    @classmethod
    def from_peft_config(cls, config: Mapping[str, Any]) -> Variant | None:
        block = int(config.get("oft_block_size") or 0)
        if block <= 0:
            raise AdapterError("this PEFT OFT adapter gives r but no oft_block_size; save it again with PEFT ≥ 0.17.")
        terms = int(config.get("num_cayley_neumann_terms") or 5) if config.get("use_cayley_neumann", True) else 0
        return _PeftSeries(block, terms) if terms else OFT(block)

    def from_peft(self, layer: Layer, tensors: Tensors, shared: Tensors) -> dict[str, Tensor]:
        return {"q": -tensors["oft_R.weight"]}


@dataclass(frozen=True)
class _PeftSeries(OFT):
    """An OFT file whose R is PEFT's truncated series: read if the series has converged, refused otherwise."""

    terms: int = setting(5, "terms of PEFT's series", at_least=1)

    def as_read(self) -> Variant:
        return OFT(self.block)

    def from_peft(self, layer: Layer, tensors: Tensors, shared: Tensors) -> dict[str, Tensor]:
        q = tensors["oft_R.weight"]
        full = skew(q, self.block)
        eye = torch.eye(self.block, dtype=full.dtype, device=full.device)
        gap = float((_series(full, self.terms) - eye - cayley_minus_identity(full)).abs().max())
        if not gap <= SERIES_TOLERANCE:
            raise AdapterError(
                f"{layer.name}: this OFT was trained with PEFT's {self.terms}-term series, which is {gap:.1e} away "
                f"from the rotation itself (allowed {SERIES_TOLERANCE:g}); use "
                "use_cayley_neumann=False, or merge with PEFT."
            )
        return {"q": q}
