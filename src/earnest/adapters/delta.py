"""ΔW of one layer as a linear operator."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.adapters.kernel import Factors
from earnest.adapters.linalg import gathered
from earnest.adapters.runtime import Slot

BLOCK = 8
"""Vectors per block of the iteration."""
MOST = 200
"""Most iterations; needed only if the singular values of the block are close to the next one."""
CLOSE = 1e-4
"""The iteration stops when ‖ΔWᵀu − σv‖ is below this share of σ."""


class Delta:
    """ΔW = W' − W of one slot on the base weight, at the current scale. ΔW is not formed if the variant has factors."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.shape = (slot.layer.m, slot.layer.n)
        variant = slot.variant
        plain = variant.uses("factors") and not variant.uses("weight") and slot.gate.scale != 0.0
        with torch.no_grad():
            self._factors: Factors | None = None
            if plain:  # not slot.factors(): those are cast for sampling
                self._factors = variant.factors(slot.tensors, slot.layer, slot.gate.scale).plain()
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
                b = None if slot.layer.bias is None else gathered(slot.layer.bias).float()
                new, _ = slot.variant.weight(slot.whole(), slot.layer, w, b, slot.gate.scale)
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
    def leading(self) -> tuple[Float[Tensor, " m"], Float[Tensor, " n"]]:
        """Unit vectors u, v with ΔW v = σ u and ΔWᵀ u = σ v for the largest σ; u is 0 where ΔW is.

        Subspace iteration on a block of vectors. With a single vector, two nearly equal singular values would slow the
        iteration down; σ would be too small and its derivative wrong.
        """
        rng = torch.Generator().manual_seed(0)
        start = torch.randn(self.shape[1], min(BLOCK, *self.shape), generator=rng).to(self._slot.layer.device)
        basis = torch.linalg.qr(start).Q
        for _ in range(MOST):
            image = self.matvec(basis)
            if not bool(torch.isfinite(image).all()):
                return image[:, 0], basis[:, 0]  # not finite: the caller refuses the loss and names it
            left, values, right = torch.linalg.svd(image, full_matrices=False)
            u, v = left[:, 0], basis @ right[0]
            if float(values[0]) <= torch.finfo(values.dtype).tiny:
                return torch.zeros_like(u), v
            back = self.rmatvec(left)
            if float((back[:, 0] - values[0] * v).norm()) <= CLOSE * float(values[0]):
                break
            basis = torch.linalg.qr(back).Q
        return u, v
