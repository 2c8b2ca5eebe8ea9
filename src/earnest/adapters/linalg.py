"""Small linear algebra that several variants share: truncated SVD, skew blocks, Cayley rotations."""

from __future__ import annotations

import math

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
    rows, cols = torch.triu_indices(block, block, 1, device=upper.device)
    full = upper.new_zeros(upper.shape[0], block, block)
    full = full.index_put((torch.arange(upper.shape[0], device=upper.device)[:, None], rows, cols), upper)
    return full - full.transpose(-1, -2)


def bounded(x: Float[Tensor, "g b b"], max_angle: float) -> Float[Tensor, "g b b"]:
    """x scaled so that no angle of its Cayley rotation exceeds max_angle.

    The Cayley angle of an eigenvalue ±iσ is 2·atan σ, and σ_max ≤ ‖x‖_F/√2 for a skew matrix: so the whole rotation is
    bounded, not single entries.
    """
    limit = math.tan(max_angle / 2)
    square = x.pow(2).sum((-1, -2), keepdim=True) / 2
    return x * (limit**2 / square.clamp_min(limit**2)).sqrt()


def cayley_minus_identity(x: Float[Tensor, "g b b"]) -> Float[Tensor, "g b b"]:
    """R − I = (I − X)⁻¹ 2X for R = (I − X)⁻¹(I + X): exactly 0 at X = 0."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.linalg.solve(eye - x, 2 * x)
