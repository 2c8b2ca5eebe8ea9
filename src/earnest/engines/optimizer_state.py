"""A ``torch.optim`` state as tensors and JSON, without pickle, and back, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from earnest.errors import CheckpointError


def flatten_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by "<parameter>.<name>", and everything else (groups, plain numbers) as JSON-able data."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            (tensors if isinstance(value, Tensor) else numbers)[f"{index}.{name}"] = value
    return tensors, {"groups": state["param_groups"], "numbers": numbers, "names": sorted(tensors)}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Load what ``flatten_optimizer`` returned; a missing or extra tensor raises."""
    if sorted(tensors) != meta["names"]:
        odd = sorted(set(tensors) ^ set(meta["names"]))
        raise CheckpointError(f"the optimizer's state does not match its list of tensors; differing: {odd[:5]}.")
    current = optimizer.state_dict()["param_groups"]
    sizes, saved = [len(g["params"]) for g in current], [len(g["params"]) for g in meta["groups"]]
    if sizes != saved:
        raise CheckpointError(
            f"the checkpoint's optimizer has parameter groups of {saved}, this one of {sizes}; use the same adapter."
        )
    state: dict[int, dict[str, Any]] = {}
    for key, value in [*tensors.items(), *meta["numbers"].items()]:
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    groups = [
        {k: tuple(v) if isinstance(v, list) and k != "params" else v for k, v in g.items()} for g in meta["groups"]
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
