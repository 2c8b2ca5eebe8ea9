"""What the watch checks of the updates themselves: whether gradients are cleared between two of them, whether the
logged norm is that of what the optimizer is given, whether there is a learning rate, and who owns what."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit.limits import ENOUGH, MANY, SURE
from earnest_audit.verdict import Finding, judged

SLACK = 0.9  # a norm in 16 bits, or one that leaves out a bias, is a little shorter


@dataclass
class Cleared:
    """Between two updates ``.grad`` has to be empty once when a backward arrives. One small parameter is observed, by a
    hook that is removed at the next update.

    Two optimizers that take turns clear at the start of their turns, when the other's backward has been through: so any
    backward counts, not only the first.
    """

    looks: int = 0
    dirty: int = 0  # looks in a row
    _handle: Any = None
    _fired: bool = False
    _clean: bool = False

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """The optimizer has stepped."""
        self.stop()
        full = [p for p in parameters if p.requires_grad and p.grad is not None and p.grad.layout == torch.strided]
        first = next((p for p in sorted(full, key=Tensor.numel) if _any(p.grad)), None)
        if first is not None:
            self._handle = first.register_hook(lambda _: self._arrives(first))
        elif full:  # cleared inside the step, or by a hook of it
            self._fired = self._clean = True

    def _arrives(self, p: Tensor) -> None:
        self._fired = True
        self._clean |= not _any(p.grad)

    def end(self) -> None:
        """The optimizer is about to step again."""
        if self._fired:
            self.looks += 1
            self.dirty = 0 if self._clean else self.dirty + 1
        self.stop()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle, self._fired, self._clean = None, False, False

    def finding(self) -> Iterator[Finding]:
        if self.looks < ENOUGH:
            return
        yield judged(
            "SE", "gradients between two updates", f"left in place in the last {self.dirty} of {self.looks} looks",
            f"cleared, fewer than {ENOUGH} looks in a row", self.dirty < ENOUGH,
            "Every backward adds to the gradient of the updates before: zero_grad is missing, or clears another "
            "model's.",
        )  # fmt: skip


def _any(grad: Tensor | None) -> bool:
    return grad is not None and bool((grad != 0).any())


@dataclass
class Norm:
    """A logged ``grad_norm`` is the whole norm, before a clip or after it: never below the norm that the optimizer is
    given."""

    looks: int = 0
    short: int = 0
    ratio: float = math.inf  # the largest logged / handed
    logged: float | None = None  # of the update that is about to be made

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        logged, self.logged = self.logged, None
        # A fused optimizer may be handed a scaled gradient, and unscale it inside.
        if logged is None or not math.isfinite(logged) or getattr(optimizer, "grad_scale", None) is not None:
            return
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        handed = math.sqrt(sum(float(torch.linalg.vector_norm(g.detach().float())) ** 2 for g in grads))
        if handed == 0 or not math.isfinite(handed):
            return
        self.ratio = logged / handed if not self.looks else max(self.ratio, logged / handed)
        self.looks += 1
        self.short += logged < SLACK * handed

    def finding(self) -> Iterator[Finding]:
        if self.looks < SURE:
            return
        yield judged(
            "MR", "grad_norm", f"at most {self.ratio:.2g} of what the optimizer is given, in {self.looks} looks",
            f"≥ {SLACK:g}", self.short < self.looks,
            "The norm that is logged, and perhaps clipped by, is that of a part: one rank's shard, one group, or the "
            "last micro-batch.",
        )  # fmt: skip


@dataclass
class Rates:
    """Learning rates, by parameter: what they are, and the highest that they were or are meant to be."""

    peaks: dict[int, float] = field(default_factory=dict)
    now: dict[int, float] = field(default_factory=dict)
    looks: int = 0
    ever: bool = False  # a rate above 0 was seen

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        self.now = {}
        for group in optimizer.param_groups:
            rate = float(group.get("lr", 1.0))
            peak = max(rate, float(group.get("initial_lr", 0.0)))
            for p in group["params"]:
                self.now[id(p)] = rate
                self.peaks[id(p)] = max(peak, self.peaks.get(id(p), 0.0))

    def count(self, gradients: bool) -> None:
        """After a look: whether there was a gradient to follow."""
        if self.now and gradients:
            self.looks += 1
            self.ever |= any(self.now.values())

    def full(self, p: Tensor) -> bool:
        """Whether an update is meant to be seen: at the foot of a warm-up, or the end of a decay, 16 bits legitimately
        lose it."""
        return self.now.get(id(p), 0.0) > 0 and self.now[id(p)] >= 0.5 * self.peaks[id(p)]

    def finding(self) -> Iterator[Finding]:
        if self.looks < MANY:
            return
        yield judged(
            "GL", "the learning rate", f"{'above' if self.ever else 'always'} 0 in {self.looks} looks", "above 0",
            self.ever,
            "Every group's learning rate is 0 while gradients come: a schedule that was cast to whole numbers, or "
            "counts epochs. (A schedule that ends at 0 is not an error.)",
        )  # fmt: skip
