"""σ_max(ΔW) of every adapted module, differentiable by the adapter's parameters.

    σ = uᵀ ΔW v   with the leading singular vectors u, v found by power iteration and then held fixed;  ∂σ/∂ΔW = u vᵀ

Nothing dense is formed where ΔW has factors. At ΔW = 0 the value and the gradient are 0 (a subgradient).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.adapters import Adapter
from earnest.adapters.delta import Delta
from earnest.adapters.runtime import Slot


def spectral_norms(adapter: Adapter, iterations: int) -> Float[Tensor, " L"]:
    """One number a module, in the order of ``adapter.slots``."""
    return torch.stack([_norm(slot, iterations) for slot in adapter.slots.values()])


def _norm(slot: Slot, iterations: int) -> Float[Tensor, ""]:
    u, v = _leading(Delta(slot), iterations, slot.layer.device)
    scale = slot.gate.scale
    if slot.variant.uses("factors") and not slot.variant.uses("weight"):
        factors = slot.variant.factors(slot.tensors, slot.layer, scale)
        return factors.scale * ((u @ factors.left()) @ (factors.A.float() @ v))
    weight, bias = slot.layer.weight(), slot.layer.bias
    merged, _ = slot.variant.weight(slot.tensors, slot.layer, weight, None if bias is None else bias.float(), scale)
    return u @ ((merged - weight) @ v)


@torch.no_grad()
def _leading(delta: Delta, iterations: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Unit vectors u, v with ΔW v ≈ σ u; u is 0 where ΔW is."""
    tiny = torch.finfo(torch.float32).tiny
    v = torch.randn(delta.shape[1], generator=torch.Generator().manual_seed(0)).to(device)
    v = v / v.norm()
    for _ in range(iterations):
        back = delta.rmatvec(delta.matvec(v))
        if float(back.norm()) <= tiny:
            break
        v = back / back.norm()
    u = delta.matvec(v)
    return u / u.norm().clamp_min(tiny), v
