"""Several quarantines on one training run. Route does not change the run, so it can have any number of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from earnest.guards import DirectionGuard, GuardError

if TYPE_CHECKING:
    from earnest.adapters import Adapter


class Panel:
    """Routes by name; the first one is the engine's guard."""

    def __init__(self, routes: Mapping[str, DirectionGuard]) -> None:
        if not routes or any(r.at != "update" or not r.quarantines for r in routes.values()):
            raise GuardError("a panel takes at least one Route, all at='update': only those leave the run as it is.")
        self.routes = dict(routes)

    def bind(self, adapter: Adapter, optimizer: torch.optim.Optimizer) -> None:
        for route in self.routes.values():
            route.bind(adapter, optimizer)

    def prepare(self, names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> None:
        for route in self.routes.values():
            route.prepare(names, parameters)

    def judge(
        self, names: Sequence[str], before: Sequence[Tensor], parameters: Sequence[torch.nn.Parameter]
    ) -> dict[str, float]:
        found = {name: route.judge(names, before, parameters) for name, route in self.routes.items()}
        return {f"{name}/{k}": v for name, report in found.items() for k, v in report.items()}

    def ablated(self) -> AbstractContextManager[None]:
        return next(iter(self.routes.values())).ablated()

    def describe(self) -> str:
        return "; ".join(f"{name}: {route.describe()}" for name, route in self.routes.items())

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{name}/{k}": v for name, route in self.routes.items() for k, v in route.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, route in self.routes.items():
            own = {k.removeprefix(f"{name}/"): v for k, v in state.items() if k.startswith(f"{name}/")}
            route.load_state_dict(own)
