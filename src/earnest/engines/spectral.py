"""σ_max(ΔW) of every adapted module, differentiable by the adapter's parameters.

    σ = uᵀ ΔW v   with the leading singular vectors u, v held fixed;  ∂σ/∂ΔW = u vᵀ

If ΔW has factors, no dense matrix is formed. At ΔW = 0 the value and the gradient are 0 (a subgradient).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.adapters import Adapter
from earnest.adapters.delta import Delta
from earnest.adapters.layer import ModuleLayer
from earnest.adapters.runtime import Slot
from earnest.errors import ObjectiveError


def spectral_norms(adapter: Adapter) -> Float[Tensor, " L"]:
    """One number per module, in the order of ``adapter.slots``."""
    for path, slot in adapter.slots.items():
        if isinstance(slot.layer, ModuleLayer):
            raise ObjectiveError(
                f"the spectral norm of ΔW needs linear layers, and {path} is a {slot.layer.base_class.__name__}; train "
                "linear layers only (adapter.targets=all-linear), or leave the term out."
            )
    return torch.stack([_norm(slot) for slot in adapter.slots.values()])


def _norm(slot: Slot) -> Float[Tensor, ""]:
    u, v = Delta(slot).leading()
    scale = slot.gate.scale
    if slot.variant.uses("factors") and not slot.variant.uses("weight"):
        factors = slot.variant.factors(slot.tensors, slot.layer, scale).plain()
        return factors.scale * ((u @ factors.left()) @ (factors.A.float() @ v))
    weight, bias = slot.layer.weight(), slot.layer.bias
    merged, _ = slot.variant.weight(slot.tensors, slot.layer, weight, None if bias is None else bias.float(), scale)
    return u @ ((merged - weight) @ v)
