"""Predict whether a run fits, find the largest micro-batch that fits, and suggest changes, the cheapest first."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from earnest.config.schema import RunConfig
from earnest.errors import ConfigError
from earnest.models.device import DTYPES
from earnest.models.loading import load_config
from earnest.models.quantised import KINDS, Kind
from earnest.plan.memory import Device, Memory, memory, vocabulary_bytes
from earnest.plan.paper import LINK, TFLOPS, Paper, paper
from earnest.plan.shape import PassSize, Shape, bytes_of
from earnest.plan.workload import Workload, workload


@dataclass(frozen=True)
class Suggestion:
    """Settings that lower memory, their cost, and the peak in bytes with these and all earlier suggestions applied."""

    settings: tuple[str, ...]
    cost: str
    peak: int
    fits: bool


@dataclass(frozen=True)
class MemoryPlan:
    """The prediction for one run on one kind of device."""

    model: str
    parameters: int
    trained: int
    dtype: str
    ranks: int
    """Devices that the run uses: engine.shard × engine.replicate."""
    device: Device
    work: Workload
    memory: Memory
    paper: Paper
    largest_rows: int
    """The most rows of this length that fit in one micro-batch; 0 if one row does not fit."""
    changes: tuple[Suggestion, ...]

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.device.room

    def record(self) -> dict[str, Any]:
        """All fields as a dictionary for JSON; sizes in bytes, times in seconds."""
        made = asdict(self) | {"fits": self.fits, "peak": self.memory.peak, "peaks": self.memory.peaks}
        made["device"] |= {"room": self.device.room}
        return made


def plan(
    config: RunConfig,
    device: Device,
    *,
    tokens: int | None = None,
    tflops: float = TFLOPS,
    link: float = LINK,
    say: Callable[[str], None] = lambda _: None,
) -> MemoryPlan:
    """Predict the memory and time of a run of ``config``. ``tokens`` is the length of a row; None: it is measured on
    the task or the data."""
    if config.engine.kind != "local":
        raise ConfigError("engine.kind: a service plans its own memory; set engine.kind=local to plan a run here.")
    if config.engine.tensor > 1:
        raise ConfigError(
            "engine.tensor: the memory of layers that ranks share is not predicted; plan with engine.shard instead, "
            "which holds as many of the weights between steps."
        )
    if (ranks := config.engine.ranks) > device.count:
        raise ConfigError(
            f"engine.shard × engine.replicate is {ranks}, and there are {device.count} devices; give --count {ranks}, "
            "or lower them."
        )
    known = load_config(config.model, say)
    work = workload(config, tokens, say)
    shapes = _Shapes(known, device)
    shape = shapes.of(config)
    work = _with_teacher(work, config, shapes, say)
    found = memory(shape, config, work, device)
    fits = found.peak <= device.room
    return MemoryPlan(
        config.model,
        shape.parameters,
        sum(p.numel() for p in shape.adapter.parameters()),
        config.dtype if config.dtype in KINDS else str(shape.policy.dtype).removeprefix("torch."),
        ranks,
        device,
        work,
        found,
        paper(shape, config, work, device, tflops, link),
        largest(shape, config, work, device, found),
        () if fits else tuple(_changes(shapes, config, work, device)),
    )


class _Shapes:
    """The model of a recipe with fake tensors, built once for each dtype and adapter."""

    def __init__(self, known: Any, device: Device) -> None:
        self.known, self.device = known, device
        self._made: dict[str, Shape] = {}

    def of(self, config: RunConfig) -> Shape:
        key = f"{config.dtype} {config.adapter!r}"
        if key not in self._made:
            dtype = dtype_of(config, self.known, self.device)
            eager = self.device.kind == "cpu" and dtype.itemsize == 2
            small: Kind | None = "nf4" if config.dtype == "nf4" else "int8" if config.dtype == "int8" else None
            self._made[key] = Shape(self.known, dtype, config.adapter, eager=eager, quantised=small)
        return self._made[key]


def dtype_of(config: RunConfig, known: Any, device: Device) -> torch.dtype:
    """The dtype of the base on this device: as the recipe gives it, or as ``en.load`` chooses it."""
    if config.dtype in DTYPES:
        return DTYPES[config.dtype]
    own = getattr(known, "dtype", None)
    own = DTYPES.get(own) if isinstance(own, str) else own
    return torch.float32 if device.kind == "cpu" or own is None else own


def _with_teacher(work: Workload, config: RunConfig, shapes: _Shapes, say: Callable[[str], None]) -> Workload:
    if config.teacher.kind != "model":
        return work
    name = config.teacher.model or config.model
    other = Shape(load_config(name, say), dtype_of(config, shapes.known, shapes.device), config.adapter)
    return replace(work, teacher_bytes=bytes_of(other.weights))


def largest(shape: Shape, config: RunConfig, work: Workload, device: Device, found: Memory) -> int:
    """The most rows of a micro-batch that fit, by linear extrapolation of the memory in the number of rows."""
    parts = found.moments["train"]
    fixed = sum(size for part, size in parts.items() if part not in ("activations", "logits", "temporary"))
    objective = config.build_objective()

    def needed(rows: int) -> int:
        size, active = PassSize(rows, work.row_tokens), rows * work.completion
        traced = shape.trace([size], active, checkpointed=config.engine.checkpoint_activations, again=True)
        return max(traced.peak, traced.kept + vocabulary_bytes(shape, objective, active, device))

    room = device.room - fixed
    sizes = {1: needed(1), 2: needed(2)}
    if sizes[1] > room:
        return 0
    for _ in range(4):  # extrapolate from the two largest measured numbers of rows until the guess repeats
        low, high = sorted(sizes)[-2:]
        slope = max(1.0, (sizes[high] - sizes[low]) / (high - low))
        guess = max(1, int(high + (room - sizes[high]) // slope))
        if guess in sizes:
            break
        sizes[guess] = needed(guess)
    return max(rows for rows, size in sizes.items() if size <= room)


def _changes(shapes: _Shapes, config: RunConfig, work: Workload, device: Device) -> list[Suggestion]:
    """Apply the changes one after the other until the run fits."""
    found: list[Suggestion] = []
    for place in range(len(_options(config, work, device))):
        effective, settings, cost = _options(config, work, device)[place]  # of the settings changed so far
        if not effective:
            continue
        config = _changed(config, settings)
        peak = memory(shapes.of(config), config, work, device).peak
        words = tuple(f"{key}={json.dumps(value).strip(chr(34))}" for key, value in settings.items())
        found.append(Suggestion(words, cost, peak, peak <= device.room))
        if found[-1].fits:
            break
    return found


def _options(c: RunConfig, work: Workload, device: Device) -> list[tuple[bool, dict[str, Any], str]]:
    """The possible changes, cheapest first: (whether it would have an effect, settings, cost)."""
    engine, stored, smaller = c.engine, not c.engine.checkpoint_activations, work.row_tokens < c.micro_tokens
    narrow = device.kind == "gpu" and DTYPES.get(c.dtype) == torch.float32
    many = work.samples_here and c.eval.prompts * c.eval.samples > work.rows
    if device.count > 1:
        able, cost = device.count > engine.ranks or engine.replicate > 1, "the weights are sent twice per micro-batch"
        last: dict[str, Any] = {"engine.shard": device.count, "engine.replicate": 1}
    else:
        able = engine.shard == 1 and c.dtype not in KINDS and c.adapter.kind != "full"
        last, cost = {"dtype": "nf4"}, "a base of 16 levels per weight (QLoRA); the adapter is not merged"
    return [
        (engine.pack is False, {"engine.pack": None}, "nothing: fewer tokens are computed"),
        (smaller, {"micro_tokens": work.row_tokens}, "more, smaller passes over the same batch"),
        (narrow, {"dtype": "bfloat16"}, "a coarser base; the adapter stays in float32"),
        (stored, {"engine.checkpoint_activations": True}, "one more forward pass: about a third more time"),
        (many, {"eval.prompts": max(1, work.rows // c.eval.samples)}, "a less exact evaluation"),
        (able, last, cost),
    ]


def _changed(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    made = config.model_copy(deep=True)
    for key, value in settings.items():
        *path, last = key.split(".")
        place: Any = made
        for part in path:
            place = getattr(place, part)
        setattr(place, last, value)
    return made
