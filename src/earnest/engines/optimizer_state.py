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
            key = f"{index}.{name}"
            if hasattr(value, "__tensor_flatten__"):  # torchao's moments in 8 bits
                tensors |= {f"{key}.{part}": getattr(value, part) for part in value.__tensor_flatten__()[0]}
            else:
                (tensors if isinstance(value, Tensor) else numbers)[key] = value
    groups = [{k: v.item() if isinstance(v, Tensor) else v for k, v in g.items()} for g in state["param_groups"]]
    return tensors, {"groups": groups, "numbers": numbers, "names": sorted(tensors)}


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
        index, name, *part = key.split(".")
        own = state.setdefault(int(index), {})
        if part:
            own.setdefault(name, {})[part[0]] = value
        else:
            own[name] = value
    for own in state.values():
        own |= {name: _in_8_bits(parts) for name, parts in own.items() if isinstance(parts, dict)}
    groups: list[dict[str, Any]] = [
        {k: tuple(v) if isinstance(v, list) and k != "params" else v for k, v in g.items()} for g in meta["groups"]
    ]
    for group, mine in zip(groups, current, strict=True):
        group |= {k: torch.full_like(v, group[k]) for k, v in mine.items() if isinstance(v, Tensor)}
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _in_8_bits(parts: Mapping[str, Tensor]) -> Tensor:
    """A moment of torchao's 8-bit AdamW from its codes, scales and table; a signed one has negative values in it."""
    from torchao.optim.subclass_8bit import OptimState8bit

    signed = bool((parts["qmap"] < 0).any())
    return OptimState8bit(parts["codes"], parts["scale"], parts["qmap"], signed, dtype=torch.float32)
