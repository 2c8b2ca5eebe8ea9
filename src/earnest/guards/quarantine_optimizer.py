"""A second optimizer for the quarantine, with the settings of the first: routing at the gradient, as published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from earnest.adapters.linalg import is_sharded
from earnest.engines.muon import MuonAndAdamW
from earnest.engines.optimizer_state import flatten_optimizer, restore_optimizer
from earnest.engines.trained import as_shard, part_of


class QuarantineOptimizer:
    """Update the quarantine with the gradients set on it. Its learning rates follow the schedule of ``optimizer``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mirror: Mapping[torch.nn.Parameter, Tensor],
        held: Mapping[int, Tensor],
    ) -> None:
        """``mirror``: parameter → its quarantine; ``held``: id of a quarantine → the model's parameter, of which this
        rank may have some rows."""
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
        self._groups = groups
        self._held = {id(self._of[key]): parameter for key, parameter in held.items()}
        self.optimizer = self._make()

    def _make(self) -> torch.optim.Optimizer:
        # A constructor may require a learning rate even if every group sets one.
        kind: Any = type(self.first)
        made: torch.optim.Optimizer = kind(self._groups, lr=self.first.param_groups[0]["lr"])
        if isinstance(made, MuonAndAdamW):
            made.held = lambda quarantine: self._held[id(quarantine)]
        return made

    def set_gradient(self, quarantine: Tensor, gradient: Tensor) -> None:
        self._of[id(quarantine)].grad = gradient.to(quarantine.dtype)

    def step(self) -> None:
        for mine, theirs in zip(self.optimizer.param_groups, self._followed, strict=True):
            mine["lr"] = theirs["lr"]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Tensor]:
        found = {k: v.detach().clone() for k, v in flatten_optimizer(self.optimizer)[0].items()}
        for key, value in found.items():
            own, held = self._owner(key)
            if is_sharded(held) and value.shape == own.shape:
                found[key] = as_shard(value, held)
        return found

    def _owner(self, key: str) -> tuple[Tensor, Tensor]:
        """The quarantine that a tensor of the optimizer's state belongs to, and the model's parameter."""
        owned = [q for group in self.optimizer.param_groups for q in group["params"]]
        own = owned[int(key.partition(".")[0])]
        return own, self._held[id(own)]

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.optimizer = self._make()
        if state:
            meta = flatten_optimizer(self.optimizer)[1]
            held = {k: self._owner(k)[1] for k in state}
            own = {k: part_of(v, held[k]) if v.shape == held[k].shape else v for k, v in state.items()}
            restore_optimizer(self.optimizer, own, meta | {"names": sorted(state)})
