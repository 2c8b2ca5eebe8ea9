"""A second optimizer for the quarantine, with the settings of the first: routing at the gradient, as published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from earnest.engines.optimizer_state import flatten_optimizer, restore_optimizer


class QuarantineOptimizer:
    """Update the quarantine with the gradients set on it. Its learning rates follow the schedule of ``optimizer``."""

    def __init__(self, optimizer: torch.optim.Optimizer, mirror: Mapping[torch.nn.Parameter, Tensor]) -> None:
        # The quarantine's tensors themselves become the parameters of this optimizer: a step changes them in place.
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

    def set_gradient(self, quarantine: Tensor, gradient: Tensor) -> None:
        """Set the gradient for the next step of one quarantine tensor."""
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
    """A constructor may require a learning rate even if every group sets one."""
    return {"lr": optimizer.param_groups[0]["lr"]}
