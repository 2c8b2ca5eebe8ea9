"""Which base an adapter belongs to: an exact hash for equal dtypes; for other dtypes a sketch that tolerates
rounding."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from earnest.adapters.errors import AdapterError
from earnest.adapters.layer import Layer

SKETCHES = 4
# A rounding error E of a weight moves a sketch by about ‖E‖: 0.3 % of ‖W‖ in bf16, 1 % in int8; another weight by >
# 100 %.
TOLERANCE = 0.05


def _signs(size: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (SKETCHES, size), generator=rng).float() * 2 - 1


@torch.no_grad()
def base_fingerprint(layers: Mapping[str, Layer]) -> dict[str, Any]:
    """{'sha256', 'dtype', 'sketch': {tensor: [norm, uᵀWv …]}} of the adapted layers' base weights."""
    sha, sketch = hashlib.sha256(), {}
    for _, layer in sorted(layers.items()):
        for name, w in layer.facts().items():
            cpu = w.detach().cpu()
            stored = cpu.to(layer.dtype).contiguous().flatten()  # back to the stored dtype: exact
            sha.update(f"{name} {tuple(w.shape)} {layer.dtype}".encode())
            sha.update(stored.view(torch.uint8).numpy().tobytes())
            proj = ((_signs(w.shape[0], 1) @ cpu) * _signs(w.shape[1], 2)).sum(1)
            sketch[name] = [float(cpu.norm()), *(float(p) for p in proj)]
    dtypes = sorted({f"{layer.dtype}/{layer.kind}" for layer in layers.values()})
    return {"sha256": sha.hexdigest(), "dtype": ",".join(dtypes), "sketch": sketch}


def check_fingerprint(want: Mapping[str, Any], layers: Mapping[str, Layer]) -> None:
    """Raise unless ``want`` is the fingerprint of these layers' weights, up to the dtype's rounding."""
    have = base_fingerprint(layers)
    if have["dtype"] == want["dtype"]:
        if have["sha256"] != want["sha256"]:
            raise AdapterError(
                f"this adapter belongs to other base weights: fingerprint {want['sha256'][:12]}… in the file, "
                f"{have['sha256'][:12]}… in the model; load its own base model, or pass check_base=False"
            )
        return
    for name, ours in have["sketch"].items():
        theirs = want["sketch"].get(name)
        scale = max(ours[0], 1e-12)
        if theirs is None or any(
            not math.isclose(a, b, abs_tol=TOLERANCE * scale) for a, b in zip(ours, theirs, strict=True)
        ):
            raise AdapterError(
                f"this adapter belongs to other base weights: {name} differs by more than rounding from "
                f"{want['dtype']} to {have['dtype']}; load its own base model, or pass check_base=False"
            )
