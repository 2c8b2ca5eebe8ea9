"""Several optimizers as one, for a model that is split between them (Muon for matrices, AdamW for the rest)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Together(torch.optim.Optimizer):
    """Steps, saves and loads its members in their order, that of the loop. Groups and states are the members' own
    objects. Hooks go round the whole update: the first member's step begins it, the last one's ends it, also where the
    loop steps the members itself."""

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        if not members:
            raise ValueError("Together() holds no optimizer: give at least one, Together(muon, adamw).")
        self.members = members  # the base class' own __init__ would make groups and states of its own
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """Parameter -> the state that its member keeps; to be read."""
        return {p: state for member in self.members for p, state in member.state.items()}

    def step(self, closure: Any = None) -> Any:
        """The loss of ``closure``, as the first member finds it."""
        first, *_ = [member.step(closure) for member in self.members]
        return first

    def zero_grad(self, set_to_none: bool = True) -> None:
        for member in self.members:
            member.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"members": [member.state_dict() for member in self.members]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for member, state in zip(self.members, state_dict["members"], strict=True):
            member.load_state_dict(state)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        return self.members[0].register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        return self.members[-1].register_step_post_hook(hook)

    def __repr__(self) -> str:
        return f"Together({', '.join(type(m).__name__ for m in self.members)})"
