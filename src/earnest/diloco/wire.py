"""How a difference of weights is encoded: one flat vector, one safetensors buffer.

    kind        what is sent                                             bits per weight      paper
    fp32        the vector                                               32
    bf16        the vector, rounded                                      16
    int8        blocks of 256: round(127 v / max|v|), and max|v|         8.125
    int4        blocks of 128: round(7 v / max|v|), and max|v|           4.25                 2501.18512
    topk        the k largest |v|: gaps between them, int8 values        about 16 · density
    sparseloco  the k largest |v| of each 4096: gaps, sign and one of    about 11 · density   2508.15706
                two magnitudes (2 bits), and the magnitudes
    pulse       the fp32 values where the weight changes in bf16         about 40 · density   2602.03839

Every lossy kind feeds its error back: what was not sent, times ``feedback``, is added to the next round's difference.
With a feedback of 1

    Σ sent + residual  =  Σ differences           (exactly, up to fp32 rounding of the sums).

SparseLoCo uses 0.95 and no outer momentum: the residual, a decaying sum of past differences, takes its place.
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

Kind = Literal["fp32", "bf16", "int8", "int4", "topk", "sparseloco", "pulse"]
KINDS: tuple[Kind, ...] = ("fp32", "bf16", "int8", "int4", "topk", "sparseloco", "pulse")
SPARSE: tuple[Kind, ...] = ("topk", "sparseloco")
"""The kinds with a density."""
INT8_BLOCK, INT4_BLOCK, CHUNK = 256, 128, 4096
FlatVector = Float[Tensor, " n"]


@dataclass(frozen=True)
class Wire:
    """``density``: the share of weights that ``topk`` and ``sparseloco`` send, None: 1/64; other kinds refuse it.
    ``feedback``: the share of what was not sent that is added to the next difference, None: 0.95 for ``sparseloco``,
    1 for other kinds; ``fp32`` sends everything and refuses it."""

    kind: Kind = "bf16"
    density: float | None = None
    feedback: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"wire kind {self.kind!r} is unknown; known: {', '.join(KINDS)}.")
        if self.density is not None and self.kind not in SPARSE:
            raise ConfigError(
                f"sync.density: only {' and '.join(SPARSE)} have a density, not {self.kind}; leave it out."
            )
        if self.density is not None and not 0 < self.density <= 1:
            raise ConfigError(f"sync.density is {self.density}; give a share above 0 and at most 1.")
        if self.feedback is not None and not self.lossy:
            raise ConfigError(f"sync.feedback: {self.kind} sends everything, so nothing is fed back; leave it out.")
        if self.feedback is not None and not 0 <= self.feedback <= 1:
            raise ConfigError(f"sync.feedback is {self.feedback}; give a share from 0 to 1.")

    @property
    def kept(self) -> float:
        """The share of the residual that is added to the next difference."""
        if self.feedback is not None:
            return self.feedback
        return 0.95 if self.kind == "sparseloco" else 1.0

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
            return {"values": pack_bits((levels + 8).to(torch.uint8), 4), "scale": scale}
        if self.kind == "topk":
            at = largest(v, self.density or DENSITY, v.numel())
            levels, scale = quantize(v[at], 127, INT8_BLOCK)
            return {"gaps": pack_gaps(at), "values": levels, "scale": scale}
        if self.kind == "sparseloco":
            at = largest(v, self.density or DENSITY, CHUNK)
            codes, magnitudes = two_bits(v[at], at // CHUNK, -(-v.numel() // CHUNK))
            return {"gaps": pack_gaps(at), "values": pack_bits(codes, 2), "magnitudes": magnitudes}
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
        vector = _unpack(kind, load(payload), count)
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
        return dequantize(unpack_bits(values, n, 4).to(torch.int8) - 8, parts["scale"], 7, INT4_BLOCK)
    vector, at = torch.zeros(n), unpack_gaps(parts["gaps"])
    if kind == "topk":
        values = dequantize(values, parts["scale"], 127, INT8_BLOCK)
    elif kind == "sparseloco":
        values = from_two_bits(unpack_bits(values, at.numel(), 2), parts["magnitudes"], at // CHUNK)
    vector[at] = values
    return vector


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


def largest(v: FlatVector, density: float, chunk: int) -> Int[Tensor, " k"]:
    """The rising indices of the largest magnitudes: of each ``chunk`` numbers this share, and at least one."""
    found = [torch.zeros(0, dtype=torch.int64)]
    for begin in range(0, v.numel(), max(chunk, 1)):
        part = v[begin : begin + chunk].abs()
        found.append(begin + part.topk(max(1, round(density * part.numel())), sorted=False).indices.sort().values)
    return torch.cat(found)


def two_bits(v: FlatVector, chunk: Int[Tensor, " n"], chunks: int) -> tuple[UInt8[Tensor, " n"], Float[Tensor, " m"]]:
    """A code 0 … 3 per number (2: negative; 1: larger than its chunk's mean magnitude), and for each chunk the mean
    magnitudes of its smaller and of its larger numbers, in bf16."""
    size = v.abs()

    def mean(of: Int[Tensor, " n"], groups: int) -> Float[Tensor, " g"]:
        count = torch.zeros(groups).index_add_(0, of, torch.ones_like(size))
        return torch.zeros(groups).index_add_(0, of, size) / count.clamp(min=1)

    large = (size > mean(chunk, chunks)[chunk]).long()
    codes = (2 * (v < 0).long() + large).to(torch.uint8)
    return codes, mean(2 * chunk + large, 2 * chunks).bfloat16()


def from_two_bits(codes: UInt8[Tensor, " n"], magnitudes: Float[Tensor, " m"], chunk: Int[Tensor, " n"]) -> FlatVector:
    sizes = magnitudes.float()[2 * chunk + (codes & 1).long()]
    return torch.where(codes >= 2, -sizes, sizes)


def pack_bits(codes: UInt8[Tensor, " n"], bits: int) -> UInt8[Tensor, " m"]:
    """8 / bits codes (0 … 2^bits − 1) per byte, the first in the lowest bits."""
    several = torch.nn.functional.pad(codes, (0, -codes.numel() % (8 // bits))).view(-1, 8 // bits)
    return (several << torch.arange(0, 8, bits, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: UInt8[Tensor, " m"], n: int, bits: int) -> UInt8[Tensor, " n"]:
    if packed.numel() != -(-n * bits // 8):
        raise ValueError(f"{packed.numel()} bytes for {n} codes")
    several = packed[:, None] >> torch.arange(0, 8, bits, dtype=torch.uint8) & 2**bits - 1
    return several.reshape(-1)[:n]


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
