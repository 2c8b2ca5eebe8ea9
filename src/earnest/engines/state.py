"""The state of an engine in a checkpoint: adapter, optimizer, guard, outer hook, counters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from earnest.adapters.linalg import is_sharded
from earnest.engines import checkpoint
from earnest.engines.optimizer_state import flatten_optimizer, restore_optimizer
from earnest.engines.optimizers import set_rates
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


def _without_rate(spec: str) -> str:
    """An optimizer's settings, as they are printed, without the learning rate."""
    return re.sub(r"\blr=[^,)]+", "lr", spec)


def load(engine: LocalEngine, folder: Path, *, own_settings: bool = False) -> bool:
    """Continue from ``folder``, on any number of ranks. Returns whether the optimizer's state was loaded.

    It always is, or this raises, unless ``own_settings``: then the engine keeps its own optimizer settings and its own
    outer hook. The optimizer's state is loaded where nothing but the rate differs, and starts anew otherwise; the state
    of an outer hook that the engine does not have is left out.
    """
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
    made, own = meta["optimizer_spec"], repr(engine.optimizer_spec)
    if made != own and not own_settings:
        raise CheckpointError(f"{folder} was made with {made}, this engine has {own}; use the same.")
    parts: dict[str, dict[str, Tensor]] = {"adapter": {}, "optimizer": {}, "guard": {}, "outer": {}}
    for key, value in tensors.items():
        owner, _, name = key.partition(".")
        parts[owner][name] = value
    engine.adapter.load_state_dict(parts["adapter"])
    if restored := _without_rate(made) == _without_rate(own):
        restore_optimizer(engine.optimizer, {k: local(v) for k, v in parts["optimizer"].items()}, meta["optimizer"])
    if restored and made != own:
        set_rates(engine.optimizer, engine.optimizer_spec.lr)
    for name, part in (("guard", engine.guard), ("outer", engine.outer)):
        if part:
            part.load_state_dict(parts[name])
        elif parts[name] and not (own_settings and name == "outer"):
            raise CheckpointError(
                f"{folder} has the state of a {name}, but this engine has none; give it the same {name}."
            )
    engine.version = int(meta["version"])
    engine.objective_state = meta["objective_state"]
    return restored
