"""The bytes of one device, part by part, in the three phases (moments) of a step that need the most memory.

    train    weights, adapter, gradients, optimizer; activations, the vocabulary pass, temporary tensors
    sample   weights, adapter, optimizer; merged and packed weights, keys and values, logits of the next tokens
    update   weights, adapter, optimizer; gradients and a copy of the parameters

The parts of a moment add up to its peak.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from earnest.config.schema import RunConfig
from earnest.engines.optimizers import Optimizer
from earnest.engines.vocabulary.fused import BUDGET_BYTES
from earnest.engines.vocabulary.sweep import CHUNK_BYTES
from earnest.engines.vocabulary.tiled import ACCELERATOR_TILE_BYTES, ROWS, TILE_BYTES
from earnest.models.cache import FIRST_ROOM
from earnest.models.packed import PACKED_FROM, packable
from earnest.models.slots import CHOOSE_ELEMENTS
from earnest.objectives.base import Objective
from earnest.objectives.trust import EntropyBonus
from earnest.plan.shape import PassSize, Shape, bytes_of
from earnest.plan.workload import Workload

RESERVE = 0.08
"""The share of a device that is kept free for the CUDA context and for gaps between tensors."""
SLOTS = 256
"""The most rows that the sampler decodes at the same time."""


@dataclass(frozen=True)
class Device:
    """``count`` devices of one ``kind`` (``gpu`` or ``cpu``), each with ``bytes`` of memory."""

    kind: str
    bytes: int
    count: int = 1

    @property
    def room(self) -> int:
        """The bytes that tensors may take."""
        return int(self.bytes * (1 - RESERVE))


@dataclass(frozen=True)
class Memory:
    """Bytes per device: moment → part → bytes."""

    moments: Mapping[str, Mapping[str, int]]
    passes: tuple[PassSize, ...] = field(default=())
    """The forward passes of the largest micro-batch."""
    packed: bool = False

    @property
    def peaks(self) -> dict[str, int]:
        return {moment: sum(parts.values()) for moment, parts in self.moments.items()}

    @property
    def peak(self) -> int:
        return max(self.peaks.values())


def memory(shape: Shape, config: RunConfig, work: Workload, device: Device) -> Memory:
    """The memory of a run on each of ``device.count`` devices, of which ``engine.shard`` hold one base."""
    engine, objective = config.engine, config.build_objective()
    base, adapter = bytes_of(shape.weights), bytes_of(list(shape.adapter.named_tensors().values()))
    trained = bytes_of(shape.adapter.parameters())
    layout = work.layout(shape, config, device)
    traced = shape.trace(
        layout.largest, layout.tokens, checkpointed=engine.checkpoint_activations, again=layout.count > 1
    )
    fresh = 0 if layout.count > 1 else trained  # their gradients are inside the traced peak
    logits = vocabulary_bytes(shape, objective, layout.tokens, device)

    def share(size: int) -> int:
        """What a device holds of ``size`` bytes in shards."""
        return 0 if engine.offload else -(-size // engine.shard)

    gathered = 0 if engine.shard == 1 else base - sum(shape.block_bytes) + 2 * max(shape.block_bytes)
    passing = 0  # gradients of layers whose sum over the ranks is not a shard yet
    own = trained
    # the moving average of a teacher, and the parts that a guard keeps
    averages = trained * (int(config.teacher.kind == "ema") + int(config.guard is not None))
    cut = shape.trained_whole if engine.shard > 1 else 0
    if cut:  # offsets, gradients and moments are sharded like the base
        passing = cut - sum(shape.block_trained) + 2 * max(shape.block_trained)
        gathered += passing
        own, adapter = (size - cut + share(cut) for size in (trained, adapter))
    always = {
        "weights": share(base),
        "adapter": adapter,
        "optimizer": round(optimizer_bytes(config.optimizer.build()) * own / 4) + averages,
        "teacher": work.teacher_bytes,
    }
    moments = {
        "train": always
        | {
            "gathered weights": gathered,
            "gradients": own + passing,
            "activations": traced.kept,
            "logits": logits,
            "temporary": max(0, traced.peak - fresh - traced.kept - logits),
        },
        "update": always | {"gradients": own, "copy of the parameters": own},
    }
    if work.samples_here:
        moments["sample"] = always | _sampling(shape, config, work, device, base + cut)
    moments = {m: {part: size for part, size in parts.items() if size} for m, parts in moments.items()}
    return Memory(moments, tuple(layout.largest), layout.packed)


def vocabulary_bytes(shape: Shape, objective: Objective, tokens: int, device: Device) -> int:
    """Bytes of logits and derivatives in the vocabulary pass. It computes tiles if log-probs are the only scalars, and
    chunks of rows otherwise."""
    wide = 4
    sources = len(objective.signals() & {"teacher", "reference.distribution"})
    by_hidden = tokens * shape.width * wide
    if not sources and not any(isinstance(w.term, EntropyBonus) for w in objective.live()):
        tile = TILE_BYTES if device.kind == "cpu" else ACCELERATOR_TILE_BYTES
        return by_hidden + tile + 2 * min(tokens, ROWS) * shape.width * wide
    blocks, row = 2 + int(sources > 0), shape.vocabulary * wide
    rows = max(1, min(tokens, BUDGET_BYTES // (blocks * row), CHUNK_BYTES // row))
    states = tokens * shape.width * shape.policy.dtype.itemsize * sources
    return (1 + max(1, sources)) * by_hidden + states + blocks * rows * row


def _sampling(shape: Shape, config: RunConfig, work: Workload, device: Device, base: int) -> dict[str, int]:
    rows, prompts = work.sampled(SLOTS, config.engine.ranks)
    # A row's buffer has room for the prompt and FIRST_ROOM tokens, and doubles when it is full.
    room = first = work.prompt + min(work.completion, FIRST_ROOM)
    while room < work.prompt + work.completion:
        room *= 2
    columns = room + (room // 2 if room > first else 0)  # one layer's old buffer exists while it is copied
    layers = max(1, len(shape.blocks))
    cache = shape.cache_bytes() * rows
    merge = config.engine.shard == 1 and shape.adapter.merging_exact and shape.adapter.mergeable
    merge = merge and shape.adapter.merging_pays(rows * work.completion)
    merged = sum(bytes_of(list(slot.layer.own().values())) for slot in shape.adapter.slots.values()) if merge else 0
    packs = device.kind == "cpu" and rows > 1 and work.completion >= PACKED_FROM
    packed = sum(4 * m.in_features * m.out_features for m in packable(shape.policy.model)) if packs else 0
    first_pass = shape.trace_forward(PassSize(prompts, work.prompt)).peak
    elements = min(rows * shape.vocabulary, CHOOSE_ELEMENTS)
    return {
        "gathered weights": base if config.engine.shard > 1 else 0,
        "merged weights": merged,
        "packed weights": packed,
        "KV cache": cache * room + (cache // layers) * (columns - room),
        "logits": max(elements * (4 + 4 + 8), first_pass),
    }


def optimizer_bytes(optimizer: Optimizer) -> float:
    """Bytes of state per trained parameter, measured by one real step on a small matrix (8-bit moments: by formula)."""
    if optimizer.kind == "adamw8bit":
        return 2 * (1 + 4 / 256)
    small = torch.nn.Parameter(torch.ones(8, 8))
    small.grad = torch.ones_like(small)
    built = optimizer.build([small], [])
    built.step()
    state = [v for v in built.state[small].values() if isinstance(v, torch.Tensor) and v.numel() > 1]
    return sum(v.numel() * v.element_size() for v in state) / small.numel()


def gigabytes(size: float) -> str:
    """The size in GB (10⁹ bytes), or in MB if it is small."""
    if size >= 1e9:
        return f"{size / 1e9:,.1f} GB"
    return f"{size / 1e6:,.1f} MB" if size < 1e8 else f"{size / 1e6:,.0f} MB"


def parse_bytes(text: str) -> int | None:
    """``80GB`` → 80·10⁹; also MB, GiB, MiB, TB. None if the text is not a size."""
    units = {"mb": 10**6, "gb": 10**9, "tb": 10**12, "mib": 2**20, "gib": 2**30, "g": 10**9}
    number = text.strip().lower().rstrip("bgimt")
    unit = text.strip().lower()[len(number) :] or "gb"
    try:
        size = float(number) * units[unit]
    except (KeyError, ValueError):
        return None
    return int(size) if 0 < size < math.inf else None


def table(found: Memory) -> Sequence[tuple[str, ...]]:
    """Rows of (part, bytes at each moment)."""
    parts = list(dict.fromkeys(part for sizes in found.moments.values() for part in sizes))
    rows = [(p, *(gigabytes(m[p]) if p in m else "" for m in found.moments.values())) for p in parts]
    return [*rows, ("peak", *(gigabytes(p) for p in found.peaks.values()))]
