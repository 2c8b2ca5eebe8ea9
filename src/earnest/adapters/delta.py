"""ΔW of one layer as a linear operator."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.adapters.kernel import Factors
from earnest.adapters.runtime import Slot


class Delta:
    """ΔW = W' − W of one slot on the base weight, at its present scale; nothing dense is formed where factors exist."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.shape = (slot.layer.m, slot.layer.n)
        variant = slot.variant
        plain = variant.uses("factors") and not variant.uses("weight") and slot.gate.scale != 0.0
        with torch.no_grad():
            self._factors: Factors | None = slot.factors() if plain else None
            self._left = self._factors.left() if self._factors is not None else None
        self._dense: Tensor | None = None

    @torch.no_grad()
    def dense(self) -> Float[Tensor, "m n"]:
        """ΔW in fp32."""
        slot = self._slot
        if self._factors is not None:
            return self._factors.dense()
        if self._dense is None:
            w = slot.layer.weight()
            if slot.gate.scale == 0.0:
                self._dense = torch.zeros_like(w)
            else:
                b = slot.layer.bias
                new, _ = slot.variant.weight(
                    slot.tensors, slot.layer, w, None if b is None else b.float(), slot.gate.scale
                )
                self._dense = new - w
        return self._dense

    @torch.no_grad()
    def matvec(self, v: Float[Tensor, "n ..."]) -> Float[Tensor, "m ..."]:
        """ΔW v."""
        if self._factors is None or self._left is None:
            return self.dense() @ v
        return self._factors.scale * (self._left @ (self._factors.A.float() @ v))

    @torch.no_grad()
    def rmatvec(self, u: Float[Tensor, "m ..."]) -> Float[Tensor, "n ..."]:
        """ΔWᵀ u."""
        if self._factors is None or self._left is None:
            return self.dense().t() @ u
        return self._factors.scale * (self._factors.A.float().t() @ (self._left.t() @ u))

    @torch.no_grad()
    def spectral_norm(self, iterations: int = 30) -> float:
        """‖ΔW‖₂ by power iteration from a fixed start; a lower bound that tightens with the iterations."""
        rng = torch.Generator().manual_seed(0)
        v = torch.randn(self.shape[1], generator=rng).to(self._slot.layer.device)
        sigma = 0.0
        for _ in range(iterations):
            v = v / v.norm().clamp_min(1e-30)
            u = self.matvec(v)
            sigma = float(u.norm())
            v = self.rmatvec(u)
        return sigma

    @torch.no_grad()
    def frobenius_norm(self) -> float:
        """‖ΔW‖_F; from factors through two k×k Gram matrices."""
        if self._factors is None or self._left is None:
            return float(self.dense().norm())
        a = self._factors.A.double()
        left = self._left.double()
        square = ((left.t() @ left) * (a @ a.t())).sum()
        return abs(self._factors.scale) * float(square.clamp_min(0).sqrt())
