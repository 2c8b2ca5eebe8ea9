"""Optimizers as frozen descriptions; ``build`` makes the real ``torch.optim.Optimizer``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, TypeVar

import torch

from earnest.engines.schedules import AnySchedule
from earnest.errors import ConfigError, MissingExtra
from earnest.registry import Registry
from earnest.settings import Checked, setting

Parameters = Sequence[torch.nn.Parameter]


@dataclass(frozen=True)
class Optimizer(Checked):
    """How a gradient becomes an update. A subclass has a ``kind``, settings with at least ``lr``, and ``build``."""

    kind: ClassVar[str]

    lr: float = setting(1e-4, "the learning rate", at_least=0.0)
    _: KW_ONLY
    schedule: AnySchedule | None = setting(None, "how the learning rate changes during the run; none: it stays lr")
    lr_ratio: float = setting(
        1.0,
        "LoRA+ (arXiv 2402.12354): the tensors that the adapter declares (LoRA: B) have the rate lr·lr_ratio",
        above=0.0,
    )

    def build(self, decayed: Parameters, plain: Parameters) -> torch.optim.Optimizer:
        """The optimizer of these parameters; weight decay may act on ``decayed`` only."""
        raise NotImplementedError  # abstract: every registered optimizer defines it


def set_rates(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Every group's rate becomes ``lr``, times its ``lr_ratio`` where it has one."""
    for group in optimizer.param_groups:
        rate = lr * group.get("lr_ratio", 1.0)
        group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], torch.Tensor) else rate


def split_rates(optimizer: torch.optim.Optimizer, faster: Parameters, ratio: float) -> None:
    """Put the parameters ``faster`` into groups of their own, with ``ratio`` times the rate; before the first step."""
    chosen = {id(p) for p in faster}
    for group in list(optimizer.param_groups):
        fast = [p for p in group["params"] if id(p) in chosen]
        slow = [p for p in group["params"] if id(p) not in chosen]
        own = {"lr": group["lr"] * ratio, "lr_ratio": ratio}
        if fast and slow:
            group["params"] = slow
            optimizer.add_param_group({**group, **own, "params": fast})
        elif fast:
            group.update(own)


OPTIMIZERS: Registry[type[Optimizer]] = Registry("optimizer", "", ConfigError)

T = TypeVar("T", bound=type[Optimizer])


def register(cls: T) -> T:
    """Class decorator: makes an optimizer known by its ``kind``."""
    OPTIMIZERS.add(cls.kind, cls)
    return cls


def groups(decayed: Parameters, plain: Parameters, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups, with and without weight decay; an empty one is left out."""
    found = [{"params": list(decayed), "weight_decay": weight_decay}, {"params": list(plain), "weight_decay": 0.0}]
    return [g for g in found if g["params"]]


@register
@dataclass(frozen=True)
class AdamW(Optimizer):
    """AdamW (arXiv 1711.05101). ``weight_decay`` pulls toward the base: adapter parameters are offsets from it."""

    kind: ClassVar[str] = "adamw"

    betas: tuple[float, float] = setting(
        (0.9, 0.999), "decay rates of the mean and of the mean square of the gradient", at_least=0.0, below=1.0
    )
    eps: float = setting(1e-8, "added to the denominator", at_least=0.0)
    weight_decay: float = setting(
        0.0, "each step shrinks the parameters by lr·weight_decay of their size", at_least=0.0
    )

    def optimizer(self) -> Callable[..., torch.optim.Optimizer]:
        """The class that steps."""
        return torch.optim.AdamW

    def build(self, decayed: Parameters, plain: Parameters) -> torch.optim.Optimizer:
        made = groups(decayed, plain, self.weight_decay)
        return self.optimizer()(made, lr=self.lr, betas=self.betas, eps=self.eps)


@register
@dataclass(frozen=True)
class AdamW8bit(AdamW):
    """AdamW with its moments in 8 bits (arXiv 2110.02861), torchao's: for tensors of 4096 numbers or more.

    torchao compiles its step, so the first step of a process takes longer.
    """

    kind: ClassVar[str] = "adamw8bit"

    def optimizer(self) -> Callable[..., torch.optim.Optimizer]:
        try:
            from torchao.optim import AdamW8bit as Theirs
        except ImportError:
            raise MissingExtra("torchao", "torchao", "the optimizer adamw8bit") from None
        return Theirs


@register
@dataclass(frozen=True)
class SGD(Optimizer):
    """Plain gradient descent with optional momentum."""

    kind: ClassVar[str] = "sgd"

    lr: float = setting(1e-2, "the learning rate", at_least=0.0)
    momentum: float = setting(0.0, "share of the previous step that is added to each step", at_least=0.0, below=1.0)
    weight_decay: float = setting(
        0.0, "each step shrinks the parameters by lr·weight_decay of their size", at_least=0.0
    )

    def build(self, decayed: Parameters, plain: Parameters) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups(decayed, plain, self.weight_decay), lr=self.lr, momentum=self.momentum)
