"""``GuardCallback``: a guard in a ``transformers.Trainer``, thus in any TRL trainer.

    trainer = SFTTrainer(model=policy.model, ..., callbacks=[GuardCallback(en.Route(directions), adapter)])

The trainer clips, then ``on_pre_optimizer_step`` measures (or splits) the gradient, the trainer's optimizer steps, and
``on_optimizer_step`` guards the update: the same order as in ``LocalEngine``.

The trainer's own checkpoints have the base's weights and the optimizer, but neither the adapter nor the guard. The
callback adds one file to each of them and reads it when a training resumes; without it, resuming is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback

from earnest.adapters import Adapter
from earnest.disk import write_tensors
from earnest.guards.directions import by_owner
from earnest.guards.errors import GuardError
from earnest.guards.guard import DirectionGuard

STATE = "earnest_guard.safetensors"
"""The file with the adapter's and the guard's state in ``checkpoint-<step>``."""


class GuardCallback(TrainerCallback):
    """Guards the parameters of an earnest adapter that the trainer trains; other trainable parameters are refused.
    ``reports`` has the guard's report of each update; the trainer's log gets the last one, as ``guard/<name>``.
    ``resume``: the checkpoint that the trainer resumes from, if it is not in the trainer's ``output_dir`` (callbacks do
    not get its path)."""

    def __init__(self, guard: DirectionGuard, adapter: Adapter, *, resume: Path | str | None = None) -> None:
        self.guard, self.adapter = guard, adapter
        self.resume = None if resume is None else Path(resume)
        named = adapter.named_parameters()
        self.names, self.parameters = list(named), list(named.values())
        self.reports: list[dict[str, float]] = []
        self._before: list[Tensor] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        own = {id(p) for p in self.parameters}
        stray = [n for n, p in kwargs["model"].named_parameters() if p.requires_grad and id(p) not in own]
        if stray:
            raise GuardError(
                f"the trainer also trains {stray[0]} ({len(stray)} parameters that the guard does not see); freeze "
                "them, or train the adapter alone."
            )
        self.guard.bind(self.adapter, _bare(kwargs["optimizer"]))
        if state.global_step > 0:
            self._restore(self.resume or _checkpoint(args, state))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            parts = {"adapter": self.adapter.state_dict(), "guard": self.guard.state_dict()}
            tensors = {f"{owner}.{k}": v for owner, part in parts.items() for k, v in part.items()}
            write_tensors(_checkpoint(args, state) / STATE, tensors)

    def _restore(self, folder: Path) -> None:
        """Load adapter and guard, which the trainer's own files lack: training would continue from a new adapter."""
        try:
            tensors = load_file(folder / STATE)
        except (FileNotFoundError, SafetensorError) as error:
            raise GuardError(
                f"the trainer resumes, and {folder / STATE} with the adapter's and the guard's state cannot be read "
                f"({error}); give GuardCallback(…, resume=<that checkpoint>), or train from the start."
            ) from error
        parts = by_owner(tensors, ("adapter", "guard"), STATE)
        self.adapter.load_state_dict(parts["adapter"])
        self.guard.load_state_dict(parts["guard"])

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before = [p.detach().clone() for p in self.parameters]
        self.guard.prepare(self.names, self.parameters)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.reports.append(dict(self.guard.judge(self.names, self._before, self.parameters)))
        self._before = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs is not None and self.reports:
            reported = {f"guard/{k}": v for k, v in self.reports[-1].items()}
            logs.update(reported)
            state.log_history[-1].update(reported)  # the trainer wrote the entry before it called this


def _checkpoint(args: Any, state: Any) -> Path:
    """The folder of the trainer's checkpoint for its current step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _bare(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer that accelerate wraps."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise GuardError(f"the trainer's optimizer is a {type(optimizer).__name__}, not one of torch.optim.")
    return optimizer
