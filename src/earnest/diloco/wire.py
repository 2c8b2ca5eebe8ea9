"""How a difference of weights is encoded: one flat vector, one safetensors buffer.

    kind    what is sent                                                 bits per weight      paper
    fp32    the vector                                                   32
    bf16    the vector, rounded                                          16
    int8    blocks of 256: round(127 v / max|v|), and max|v|             8.125
    int4    blocks of 128: round(7 v / max|v|), and max|v|               4.25                 2501.18512
    topk    the k largest |v|: gaps between them, int8 values            about 16 · density   2508.15706
    pulse   the fp32 values where the weight changes in bf16             about 40 · density   2602.03839

Every lossy kind feeds its error back: what was not sent is added to the next round's difference, so

    Σ sent + residual  =  Σ differences           (exactly, up to fp32 rounding of the sums).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from earnest.errors import ConfigError
from earnest.store import Damaged

Kind = Literal["fp32", "bf16", "int8", "int4", "topk", "pulse"]
KINDS: tuple[Kind, ...] = ("fp32", "bf16", "int8", "int4", "topk", "pulse")
INT8_BLOCK, INT4_BLOCK = 256, 128
FlatVector = Float[Tensor, " n"]


@dataclass(frozen=True)
class Wire:
    """``density``: the share of weights that ``topk`` sends; others ignore it, so another value is refused there."""

    kind: Kind = "bf16"
    density: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"wire kind {self.kind!r} is unknown; known: {', '.join(KINDS)}.")
        if self.density is not None and self.kind != "topk":
            raise ConfigError(f"sync.density: only topk has a density, not {self.kind}; leave it out.")
        if self.density is not None and not 0 < self.density <= 1:
            raise ConfigError(f"sync.density is {self.density}; give a share above 0 and at most 1.")

    @property
    def lossy(self) -> bool:
        return self.kind != "fp32"

    def encode(self, vector: FlatVector, start: FlatVector) -> bytes:
        """``vector`` (start minus local weights, plus the residual) as bytes; ``start`` is read by pulse only."""
        from safetensors.torch import save

        metadata = {"wire": self.kind, "n": str(vector.numel())}
        return save({k: v.contiguous() for k, v in self._pack(vector, start).items()}, metadata)

    def _pack(self, v: FlatVector, start: FlatVector) -> dict[str, Tensor]:
        if self.kind == "fp32":
            return {"values": v}
        if self.kind == "bf16":
            return {"values": v.bfloat16()}
        if self.kind == "int8":
            levels, scale = quantize(v, 127, INT8_BLOCK)
            return {"values": levels, "scale": scale}
        if self.kind == "int4":
            levels, scale = quantize(v, 7, INT4_BLOCK)
            return {"values": pack_nibbles(levels), "scale": scale}
        if self.kind == "topk":
            k = max(1, round((self.density or DENSITY) * v.numel())) if v.numel() else 0
            at = v.abs().topk(k, sorted=False).indices.sort().values
            levels, scale = quantize(v[at], 127, INT8_BLOCK)
            return {"gaps": pack_gaps(at), "values": levels, "scale": scale}
        at = visible(start, v).nonzero()[:, 0]
        return {"gaps": pack_gaps(at), "values": v[at]}


DENSITY = 1 / 64


def decode(payload: bytes, n: int, key: str = "delta") -> FlatVector:
    """The vector that was sent, whatever its kind; ``Damaged`` where it is not one of ``n`` finite numbers."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        header = int.from_bytes(payload[:8], "little")
        metadata = json.loads(payload[8 : 8 + header])["__metadata__"]
        kind, count = metadata["wire"], int(metadata["n"])
        parts = load(payload)
        vector = _unpack(kind, parts, count)
    except (SafetensorError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise Damaged(f"{key} is not a packed vector: {error}") from None
    if vector.numel() != n:
        raise Damaged(f"{key} has {vector.numel()} numbers, {n} are trained here.")
    if not bool(torch.isfinite(vector).all()):
        raise Damaged(f"{key} has values that are not finite.")
    return vector


def _unpack(kind: str, parts: Mapping[str, Tensor], n: int) -> FlatVector:
    values = parts["values"]
    if kind in ("fp32", "bf16"):
        return values.float()
    if kind == "int8":
        return dequantize(values, parts["scale"], 127, INT8_BLOCK)
    if kind == "int4":
        return dequantize(unpack_nibbles(values, n), parts["scale"], 7, INT4_BLOCK)
    sent = dequantize(values, parts["scale"], 127, INT8_BLOCK) if kind == "topk" else values
    vector = torch.zeros(n)
    vector[unpack_gaps(parts["gaps"])] = sent
    return vector


# --- numbers ----------------------------------------------------------------------------------------------------------


def quantize(v: FlatVector, top: int, block: int) -> tuple[Int[Tensor, " n"], Float[Tensor, " b"]]:
    """Levels in −top … top and one scale per block: v ≈ scale · level / top. A block of zeros has scale 0."""
    padded = torch.nn.functional.pad(v, (0, -v.numel() % block)).view(-1, block)
    scale = padded.abs().amax(1) if padded.numel() else padded.new_zeros(0)
    unit = torch.where(scale > 0, scale, 1.0)
    levels = (padded / unit[:, None] * top).round().to(torch.int8)
    return levels.reshape(-1)[: v.numel()], scale


def dequantize(levels: Int[Tensor, " n"], scale: Float[Tensor, " b"], top: int, block: int) -> FlatVector:
    n = levels.numel()
    if scale.numel() != -(-n // block):
        raise ValueError(f"{scale.numel()} scales for {n} levels")
    padded = torch.nn.functional.pad(levels.float(), (0, -n % block)).view(-1, block)
    return (padded / top * scale[:, None]).reshape(-1)[:n]


def pack_nibbles(levels: Int[Tensor, " n"]) -> UInt8[Tensor, " m"]:
    """Two levels (−8 … 7) per byte."""
    both = torch.nn.functional.pad(levels + 8, (0, levels.numel() % 2)).to(torch.uint8).view(-1, 2)
    return both[:, 0] | (both[:, 1] << 4)


def unpack_nibbles(packed: UInt8[Tensor, " m"], n: int) -> Int[Tensor, " n"]:
    both = torch.stack([packed & 15, packed >> 4], 1).reshape(-1)
    if both.numel() - n not in (0, 1):
        raise ValueError(f"{packed.numel()} bytes for {n} levels")
    return both[:n].to(torch.int8) - 8


def pack_gaps(at: Int[Tensor, " k"]) -> UInt8[Tensor, " m"]:
    """Rising indices as bytes: the number of places skipped before each; 255 means 255 more, and the next byte
    continues.

    At a density of 1/64 nine in ten gaps are one byte.
    """
    gaps = np.diff(at.numpy(), prepend=-1) - 1
    more = gaps // 255
    ends = np.cumsum(more + 1) - 1
    out = np.full(int(ends[-1]) + 1 if len(ends) else 0, 255, dtype=np.uint8)
    out[ends] = (gaps % 255).astype(np.uint8)
    return torch.from_numpy(out)


def unpack_gaps(packed: UInt8[Tensor, " m"]) -> Int[Tensor, " k"]:
    data = packed.numpy().astype(np.int64)
    ends = data < 255
    return torch.from_numpy(np.cumsum(data)[ends] + np.arange(int(ends.sum())))


def visible(start: FlatVector, v: FlatVector) -> Tensor:
    """Where going from ``start`` to start − v changes the weight in bf16: what an inference engine can see."""
    return start.bfloat16() != (start - v).bfloat16()
