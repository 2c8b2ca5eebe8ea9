"""The device and the dtype of a policy, with the reason for the choice."""

from __future__ import annotations

import torch

from earnest.errors import ConfigError, nearest
from earnest.models.quantised import KINDS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(wanted: str) -> tuple[torch.device, str]:
    """The device and the reason. ``auto``: CUDA before MPS before CPU."""
    there = ["cpu"]
    if torch.backends.mps.is_available():
        there.insert(0, "mps")
    if torch.cuda.is_available():
        there.insert(0, "cuda")
    if wanted == "auto":
        why = "no CUDA or MPS device here" if there == ["cpu"] else f"first of {', '.join(there)}"
        return torch.device(there[0]), f"device chosen: {why}"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError(f"device {wanted!r} is not a device; use auto, or one of {', '.join(there)}.") from None
    if device.type not in there or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(f"device {wanted!r} is not on this machine; use auto, or one of {', '.join(there)}.")
    return device, "device as given"


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype | None:
    """None: keep the checkpoint's own. ``auto`` and quantised bases keep it on CUDA; CPU and MPS compute in float32."""
    if wanted == "auto" or wanted in KINDS:
        return None if device.type == "cuda" else torch.float32
    if wanted not in DTYPES:
        raise ConfigError(f"dtype {wanted!r} is not known; {nearest(wanted, ['auto', *DTYPES, *KINDS])}")
    return DTYPES[wanted]
