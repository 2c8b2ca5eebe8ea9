"""AntiPaSTO, arXiv 2601.07473:  W = U S Vᵀ + rest,  W'(c) = U (S + δ(c)) R(c) Vᵀ + rest,  R a Cayley rotation.

In delta form, with h = Vᵀ x and R − I = (I − cX)⁻¹ 2cX (exactly 0 at X = 0):

    y = W x + b + U [ S ∘ (R − I) h + δ ∘ R h ].

``gain="elu"``: δ = S ∘ ELU(c g), so S + δ > 0 always. ``gain="delta"``: δ = c·g, plain. ``block=0``: no rotation.
``rank=None``: the full basis, U and V square; with ``gain="delta", block=0`` this is the δS form y = Wx + U (δS ∘
Vᵀx) that guards project. ``max_angle`` bounds the whole rotation (not single entries). U and V are frozen, so only h
is kept for backward. The gate c is the paper's α: R(−c) = R(c)⁻¹.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from earnest.adapters.kernel import Factors
from earnest.adapters.layer import Layer
from earnest.adapters.linalg import bounded, cayley_minus_identity, skew, top_svd
from earnest.adapters.variant import Birth, Spec, Tensors, Variant, register, require
from earnest.adapters.variants.lora import check_rank


@register
@dataclass(frozen=True)
class AntiPaSTO(Variant):
    """Gains and small rotations in the weight's own singular basis."""

    rank: int | None = 32  # None: the full basis
    block: int = 4  # width of a rotation block; 0: no rotation
    gain: str = "elu"  # or "delta"
    max_angle: float = 0.5  # radians
    select: str = "top"  # or "activity": by S_i·rms(v_i·x) on calibration data
    niter: int = 0  # 0: exact SVD; otherwise iterations of a randomised one

    name = "antipasto"
    paper = "2601.07473"
    reference = "float64 of the residual form U(S+δ)R Vᵀ + W_res"
    equation = "y = Wx + b + U[S∘(R−I)h + δ∘R h],  h = Vᵀx"
    lr = 5e-3
    lr_source = "lora-lite's benchmark (5e-3); the paper trains r = 128 at 1e-3"
    examples: ClassVar = {
        "antipasto": {"rank": 8},
        "antipasto (activity)": {"rank": 8, "block": 2, "select": "activity"},
        "antipasto (full δS)": {"rank": None, "block": 0, "gain": "delta"},
    }

    def __post_init__(self) -> None:
        if self.rank is not None:
            check_rank(self.rank, self.name)
        require(self.gain in ("elu", "delta"), f'antipasto: gain must be "elu" or "delta", got {self.gain!r}')
        require(
            self.select in ("top", "activity"), f'antipasto: select must be "top" or "activity", got {self.select!r}'
        )
        require(
            self.block == 0 or self.block >= 2, f"antipasto: block must be 0 (no rotation) or ≥ 2, got {self.block}"
        )
        require(0 < self.max_angle < math.pi, f"antipasto: max_angle must lie in (0, π), got {self.max_angle!r}")
        require(self.niter >= 0, f"antipasto: niter must be ≥ 0, got {self.niter!r}")
        randomised = self.niter > 0 and (self.rank is None or self.select == "activity")
        require(not randomised, "antipasto: niter > 0 finds the top directions only; use niter=0 for this setting")

    def wants_calibration(self) -> bool:
        return self.select == "activity"

    def width(self, layer: Layer) -> int:
        return min(layer.m, layer.n) if self.rank is None else self.rank

    def check(self, layer: Layer) -> None:
        k, most = self.width(layer), min(layer.m, layer.n)
        require(k <= most, f"antipasto: rank {k} exceeds {layer.name}'s {most}; choose rank ≤ {most}, or None")
        fits = self.block == 0 or k % self.block == 0
        require(
            fits, f"antipasto: block {self.block} does not divide the rank {k} of {layer.name}; choose a divisor, or 0"
        )

    def specs(self, layer: Layer) -> dict[str, Spec]:
        k, b = self.width(layer), self.block
        frozen = {
            "U": Spec((layer.m, k), trainable=False, compute=True),
            "Vh": Spec((k, layer.n), trainable=False, compute=True),
        }
        if self.block or self.gain == "elu":
            frozen["S"] = Spec((k,), trainable=False)
        return {"g": Spec((k,))} | ({"rot": Spec((k // b, b * (b - 1) // 2))} if b else {}) | frozen

    def birth(self, layer: Layer, ctx: Birth) -> dict[str, Tensor]:
        w, k = layer.weight(), self.width(layer)
        if self.select == "top":
            u, s, vh = top_svd(w, k, self.niter, ctx.rng)
            return self._kept(layer, u, s, vh)
        u, s, vh = torch.linalg.svd(w, full_matrices=False)
        activity = ((vh @ ctx.moments[layer.name].to(vh)) * vh).sum(1).clamp_min(0).sqrt()
        best = (s * activity).argsort(descending=True)[:k].sort().values
        return self._kept(layer, u[:, best], s[best], vh[best])

    def _kept(self, layer: Layer, u: Tensor, s: Tensor, vh: Tensor) -> dict[str, Tensor]:
        return {"U": u, "Vh": vh} | ({"S": s} if "S" in self.specs(layer) else {})

    def factors(self, t: Tensors, layer: Layer, scale: float) -> Factors:
        delta = t["S"] * F.elu(scale * t["g"]) if self.gain == "elu" else scale * t["g"]
        if not self.block:
            return Factors(t["Vh"], t["U"], 1.0, delta)
        off = cayley_minus_identity(scale * bounded(skew(t["rot"], self.block), self.max_angle))
        eye = torch.eye(self.block, dtype=off.dtype, device=off.device)
        s, delta = t["S"].view(-1, self.block, 1), delta.view(-1, self.block, 1)
        return Factors(t["Vh"], t["U"], 1.0, s * off + delta * (off + eye))

    def linear(self) -> bool:
        return self.gain == "delta" and self.block == 0

    def linear_note(self) -> str:
        return "a rotation, or gains through ELU; gain='delta' with block=0 is linear"

    def portable_rank(self, layer: Layer) -> int | None:
        return self.rank

    def export_note(self) -> str:
        return "the full basis has full rank"
