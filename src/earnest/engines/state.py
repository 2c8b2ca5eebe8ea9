"""The state of an engine in a checkpoint: adapter, optimizer, guard, outer hook, counters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from earnest.engines import checkpoint
from earnest.engines.optimizer_state import flatten_optimizer, restore_optimizer
from earnest.errors import CheckpointError

if TYPE_CHECKING:
    from earnest.engines.local import LocalEngine


def save(engine: LocalEngine, folder: Path) -> Path:
    """Write everything that the next step depends on. Every rank has it whole, so rank 0 writes it."""
    scratch = engine.mesh.scratch
    if engine.mesh.rank != 0 and not (scratch is not None and folder.is_relative_to(scratch)):
        return folder
    tensors = {f"adapter.{k}": v for k, v in engine.adapter.state_dict().items()}
    optimizer_tensors, optimizer_meta = flatten_optimizer(engine.optimizer)
    tensors |= {f"optimizer.{k}": v for k, v in optimizer_tensors.items()}
    for name, part in (("guard", engine.guard), ("outer", engine.outer)):
        tensors |= {f"{name}.{k}": v for k, v in part.state_dict().items()} if part else {}
    meta = {
        "version": engine.version,
        "objective_state": engine.objective_state,
        "optimizer": optimizer_meta,
        "optimizer_spec": repr(engine.optimizer_spec),
        "base": engine.policy.fingerprint(),
    }
    return checkpoint.write(folder, tensors, meta)


def load(engine: LocalEngine, folder: Path) -> None:
    """Continue from ``folder``, on any number of ranks."""
    tensors, meta = checkpoint.read(folder)
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
    restore_optimizer(engine.optimizer, parts["optimizer"], meta["optimizer"])
    for name, part in (("guard", engine.guard), ("outer", engine.outer)):
        if part:
            part.load_state_dict(parts[name])
        elif parts[name]:
            raise CheckpointError(
                f"{folder} has the state of a {name}, but this engine has none; give it the same {name}."
            )
    engine.version = int(meta["version"])
    engine.objective_state = meta["objective_state"]
