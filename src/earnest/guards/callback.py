"""``GuardCallback``: a guard in a ``transformers.Trainer``, and so in any TRL trainer.

    trainer = SFTTrainer(model=policy.model, ..., callbacks=[GuardCallback(en.Route(directions), adapter)])

The trainer clips, then ``on_pre_optimizer_step`` measures (or splits) the gradient, the trainer's optimizer steps, and
``on_optimizer_step`` judges: the same order as in ``LocalEngine``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from earnest.adapters import Adapter
from earnest.guards.errors import GuardError
from earnest.guards.guard import DirectionGuard


class GuardCallback(TrainerCallback):
    """Guards the parameters of an earnest adapter that the trainer trains; anything else trainable is refused.

    ``reports`` has what the guard said at each update; the trainer's log gets the last one, as ``guard/<name>``.
    """

    def __init__(self, guard: DirectionGuard, adapter: Adapter) -> None:
        self.guard, self.adapter = guard, adapter
        named = adapter.named_parameters()
        self.names, self.parameters = list(named), list(named.values())
        self.reports: list[dict[str, float]] = []
        self._before: list[Tensor] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control
        own = {id(p) for p in self.parameters}
        stray = [n for n, p in kwargs["model"].named_parameters() if p.requires_grad and id(p) not in own]
        if stray:
            raise GuardError(
                f"the trainer also trains {stray[0]} ({len(stray)} parameters that the guard does not see); freeze "
                "them, or train the adapter alone."
            )
        self.guard.bind(self.adapter, _bare(kwargs["optimizer"]))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control, kwargs
        self._before = [p.detach().clone() for p in self.parameters]
        self.guard.prepare(self.names, self.parameters)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control, kwargs
        self.reports.append(dict(self.guard.judge(self.names, self._before, self.parameters)))
        self._before = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        del args, control, kwargs
        if logs is not None and self.reports:
            told = {f"guard/{k}": v for k, v in self.reports[-1].items()}
            logs.update(told)
            state.log_history[-1].update(told)  # written before the callbacks are asked


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """torch's own optimizer inside accelerate's."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise GuardError(f"the trainer's optimizer is a {type(optimizer).__name__}, not one of torch.optim.")
    return optimizer
