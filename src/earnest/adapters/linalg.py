"""Small linear algebra that several variants share: truncated SVD, skew blocks, Cayley rotations."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def top_svd(
    w: Float[Tensor, "m n"], k: int, niter: int, rng: torch.Generator
) -> tuple[Float[Tensor, "m k"], Float[Tensor, " k"], Float[Tensor, "k n"]]:
    """(U, S, Vh) of the k largest singular values. niter = 0: exact; otherwise seeded subspace iteration."""
    if niter == 0:
        u, s, vh = torch.linalg.svd(w, full_matrices=False)
        return u[:, :k], s[:k], vh[:k]
    width = min(2 * k + 8, *w.shape)
    q = torch.randn(w.shape[1], width, generator=rng).to(w)
    for _ in range(niter):
        q = torch.linalg.qr(w @ q).Q
        q = torch.linalg.qr(w.t() @ q).Q
    q = torch.linalg.qr(w @ q).Q
    u, s, vh = torch.linalg.svd(q.t() @ w, full_matrices=False)
    return (q @ u)[:, :k], s[:k], vh[:k]


def skew(upper: Float[Tensor, "g p"], block: int) -> Float[Tensor, "g block block"]:
    """Skew-symmetric blocks from their upper triangles, p = block(block−1)/2, row by row."""
    place, sign = _places(block, upper.device)
    return (upper.index_select(1, place) * sign.to(upper.dtype)).view(-1, block, block)


_PLACES: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}


def _places(block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each entry of a block: the index of its value in the upper triangle, and its sign (0 on the diagonal)."""
    if torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor:  # fake tensors are of their mode only
        return _make_places(block, device)
    if (block, device) not in _PLACES:
        with torch.inference_mode(False):  # shared by all: a tensor made in inference mode cannot take part in training
            _PLACES[block, device] = _make_places(block, device)
    return _PLACES[block, device]


def _make_places(block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    i = torch.arange(block, device=device)
    low, high = torch.minimum(i[:, None], i), torch.maximum(i[:, None], i)
    place = low * block - low * (low + 1) // 2 + high - low - 1
    sign = torch.sign(i - i[:, None]).float()
    return place.clamp(0, block * (block - 1) // 2 - 1).flatten(), sign.flatten()


def bounded(x: Float[Tensor, "g b b"], max_angle: float) -> Float[Tensor, "g b b"]:
    """x scaled so that no angle of its Cayley rotation exceeds max_angle.

    The Cayley angle of an eigenvalue ±iσ is 2·atan σ, and σ_max ≤ ‖x‖_F/√2 for a skew matrix. So the bound holds
    for the whole rotation, not for single entries.
    """
    limit = math.tan(max_angle / 2)
    square = x.pow(2).sum((-1, -2), keepdim=True) / 2
    return x * (limit**2 / square.clamp_min(limit**2)).sqrt()


def cayley_minus_identity(x: Float[Tensor, "g b b"]) -> Float[Tensor, "g b b"]:
    """R − I = (I − X)⁻¹ 2X for R = (I − X)⁻¹(I + X): exactly 0 at X = 0."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.linalg.solve(eye - x, 2 * x)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a rank's part of a tensor (torch's ``DTensor``)."""
    return hasattr(tensor, "full_tensor")


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor; if it is in shards, every rank calls this at the same time. Shards that are kept in CPU memory
    give a tensor on the mesh's device."""
    if not is_sharded(tensor):
        return tensor
    shards: Any = tensor
    return shards.full_tensor().to(shards.device_mesh.device_type)
