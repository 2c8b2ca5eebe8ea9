"""A second optimizer of the same kind and settings, on tensors of its own: the published gradient-level routing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from earnest.engines.optimizer_state import flatten_optimizer, restore_optimizer


class Twin:
    """Steps the quarantine with the parked gradients; its learning rates follow the first optimizer's schedule."""

    def __init__(self, optimizer: torch.optim.Optimizer, mirror: Mapping[torch.nn.Parameter, Tensor]) -> None:
        # The quarantine's tensors themselves become the twin's parameters: a step moves them in place.
        self.first = optimizer
        self._of = {id(q): torch.nn.Parameter(q) for q in mirror.values()}
        pairs = {id(p): self._of[id(q)] for p, q in mirror.items()}
        groups = []
        self._followed = []
        for group in optimizer.param_groups:
            mine = [pairs[id(p)] for p in group["params"] if id(p) in pairs]
            if mine:
                settings = {k: v for k, v in group.items() if k != "params"}
                groups.append({**settings, "params": mine})
                self._followed.append(group)
        self._make = lambda: type(optimizer)(groups, **_required(optimizer))
        self.optimizer = self._make()

    def park(self, quarantine: Tensor, gradient: Tensor) -> None:
        """The gradient of the next step."""
        self._of[id(quarantine)].grad = gradient.to(quarantine.dtype)

    def step(self) -> None:
        for mine, theirs in zip(self.optimizer.param_groups, self._followed, strict=True):
            mine["lr"] = theirs["lr"]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        return {k: v.detach().clone() for k, v in flatten_optimizer(self.optimizer)[0].items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.optimizer = self._make()
        if state:
            meta = flatten_optimizer(self.optimizer)[1]
            restore_optimizer(self.optimizer, state, meta | {"names": sorted(state)})


def _required(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Constructors want a learning rate even where every group has one."""
    return {"lr": optimizer.param_groups[0]["lr"]}
