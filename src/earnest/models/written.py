"""Keys by which a cache knows that a tensor was written or replaced.

    key(t) = (id, version, address, crc32 of its bytes)

Autograd's version counter misses writes through ``.data``, so on the CPU the key also has a hash of the values. On
other devices a hash would synchronise, so the key is the version and the address.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

FEW = 64
"""Bytes of a large tensor for a key that is computed at every token: a write of all elements is seen, a write of a few
elements may not be."""


def state_key(tensors: Mapping[str, Tensor], most: int | None = None) -> tuple[Any, ...]:
    """A key that changes when one of the tensors changes. ``most``: how many bytes of each are hashed; all if None."""
    return tuple(tensor_key(t, most) for t in tensors.values())


def tensor_key(t: Tensor, most: int | None = None) -> tuple[int, int, int, int]:
    return id(t), t._version, t.data_ptr(), _checksum(t, most) if t.is_cpu and most != 0 else 0


def _checksum(t: Tensor, most: int | None) -> int:
    bytes_ = t.detach().reshape(-1).view(torch.uint8).numpy()
    if not most or len(bytes_) <= most:
        return zlib.crc32(bytes_.data)
    step = len(bytes_) // most | 1  # odd, so it reaches every byte of an element and every column of a matrix
    return zlib.crc32(bytes_[::step].tobytes())
