"""The state of an engine in a checkpoint: adapter, optimizer, guard, outer hook, counters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from earnest.adapters.linalg import is_sharded
from earnest.engines import checkpoint
from earnest.engines.optimizer_state import flatten_optimizer, restore_optimizer
from earnest.engines.trained import local
from earnest.errors import CheckpointError

if TYPE_CHECKING:
    from earnest.engines.local import LocalEngine


def save(engine: LocalEngine, folder: Path) -> Path:
    """Write everything that the next step depends on. On a mesh every rank calls this at the same time."""
    tensors = {f"adapter.{k}": v for k, v in engine.adapter.state_dict().items()}
    optimizer_tensors, optimizer_meta = flatten_optimizer(engine.optimizer)
    owned = _owned(engine)
    for key, value in optimizer_tensors.items():
        tensors[f"optimizer.{key}"] = engine.trained.like(owned[int(key.partition(".")[0])], value)
    for name, part in (("guard", engine.guard), ("outer", engine.outer)):
        tensors |= {f"{name}.{k}": v for k, v in part.state_dict().items()} if part else {}
    meta = {
        "version": engine.version,
        "objective_state": engine.objective_state,
        "optimizer": optimizer_meta,
        "optimizer_spec": repr(engine.optimizer_spec),
        "base": engine.policy.fingerprint(),
    }
    return checkpoint.write(folder, tensors, meta, engine.mesh)


def _owned(engine: LocalEngine) -> list[Tensor]:
    """The optimizer's parameters in the order of its state."""
    return [p for group in engine.optimizer.param_groups for p in group["params"]]


def load(engine: LocalEngine, folder: Path) -> None:
    """Continue from ``folder``, on any number of ranks."""
    adapter, owned = engine.adapter.named_tensors(), _owned(engine)

    def shard(key: str, size: torch.Size) -> Tensor | None:
        owner, _, name = key.partition(".")
        if owner not in ("adapter", "optimizer"):
            return None
        own = adapter.get(name) if owner == "adapter" else engine.trained.of(owned[int(name.partition(".")[0])])
        return torch.empty_like(own.detach()) if own is not None and is_sharded(own) and own.shape == size else None

    tensors, meta = checkpoint.read(folder, shard if engine.trained.any_sharded else None)
    if meta["base"] != engine.policy.fingerprint():
        raise CheckpointError(f"{folder} was made on another base model than {engine.policy.name}; load that one.")
    if meta["optimizer_spec"] != repr(engine.optimizer_spec):
        made = meta["optimizer_spec"]
        raise CheckpointError(
            f"{folder} was made with {made}, this engine has {engine.optimizer_spec!r}; use the same."
        )
    parts: dict[str, dict[str, Tensor]] = {"adapter": {}, "optimizer": {}, "guard": {}, "outer": {}}
    for key, value in tensors.items():
        owner, _, name = key.partition(".")
        parts[owner][name] = value
    engine.adapter.load_state_dict(parts["adapter"])
    restore_optimizer(engine.optimizer, {k: local(v) for k, v in parts["optimizer"].items()}, meta["optimizer"])
    for name, part in (("guard", engine.guard), ("outer", engine.outer)):
        if part:
            part.load_state_dict(parts[name])
        elif parts[name]:
            raise CheckpointError(
                f"{folder} has the state of a {name}, but this engine has none; give it the same {name}."
            )
    engine.version = int(meta["version"])
    engine.objective_state = meta["objective_state"]
