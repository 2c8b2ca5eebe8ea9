"""AntiPaSTO, arXiv 2601.07473:  W = U S Vᵀ + rest,  W'(c) = U (S + δ(c)) R(c) Vᵀ + rest,  R a Cayley rotation.

In delta form, with h = Vᵀ x and R − I = (I − cX)⁻¹ 2cX (exactly 0 at X = 0):

    y = W x + b + U [ S ∘ (R − I) h + δ ∘ R h ].

``gain="elu"``: δ = S ∘ ELU(c g), so S + δ > 0 always. ``gain="delta"``: δ = c·g. ``block=0``: no rotation.
``rank=None``: the full basis, U and V square; with ``gain="delta", block=0`` this is the δS form y = Wx + U (δS ∘
Vᵀx) that guards use. ``max_angle`` bounds the whole rotation, not single entries. U and V are frozen, so only h is kept
for backward. The gate c is the paper's α: R(−c) = R(c)⁻¹.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from earnest.adapters.errors import AdapterError
from earnest.adapters.kernel import Factors
from earnest.adapters.layer import Layer
from earnest.adapters.linalg import bounded, cayley_minus_identity, skew, top_svd
from earnest.adapters.variant import Initialization, Spec, Tensors, Variant, register
from earnest.settings import setting


@register
@dataclass(frozen=True)
class AntiPaSTO(Variant):
    """Gains and small rotations in the weight's own singular basis."""

    rank: int | None = setting(32, "r, the singular directions that are used; none: all of them", at_least=1)
    block: int = setting(4, "width of a rotation block, at least 2; 0: no rotation", at_least=0)
    gain: str = setting("elu", "the form of the gains: δ = S∘ELU(c·g), or δ = c·g", choices=("elu", "delta"))
    max_angle: float = setting(0.5, "bound of the whole rotation, in radians", above=0.0, below=math.pi)
    select: str = setting(
        "top",
        "which directions: the largest singular values, or the largest S_i·rms(v_i·x) on calibration data",
        choices=("top", "activity"),
    )
    niter: int = setting(0, "iterations of a randomised SVD; 0: the exact SVD", at_least=0)

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

    def validate(self) -> None:
        if self.block == 1:
            raise AdapterError("antipasto: block must be 0 (no rotation) or at least 2, got 1.")
        if self.niter > 0 and (self.rank is None or self.select == "activity"):
            raise AdapterError("antipasto: niter > 0 finds the top directions only; use niter=0 for this setting.")

    def wants_calibration(self) -> bool:
        return self.select == "activity"

    def width(self, layer: Layer) -> int:
        return min(layer.m, layer.n) if self.rank is None else self.rank

    def check(self, layer: Layer) -> None:
        k = self.width(layer)
        layer.check_rank(self.name, k)
        if self.block and k % self.block:
            raise AdapterError(
                f"antipasto: block {self.block} does not divide the rank {k} of {layer.name}; choose a divisor, or 0."
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

    def initial(self, layer: Layer, ctx: Initialization) -> dict[str, Tensor]:
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
