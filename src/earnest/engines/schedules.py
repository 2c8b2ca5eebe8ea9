"""Learning-rate schedules. The rate of update t of T (t = 1 … T) is lr·share(t, T):

    warm-up     share = t/W                                          t ≤ W
    constant    share = 1                                            t > W
    linear      share = f + (1 − f)·(1 − p)                          p = (t − s)/(T − s),  s = max(W, 1)
    cosine      share = f + (1 − f)·(1 + cos πp)/2                   the same p
    wsd         share = 1, then f + (1 − f)·(1 − p)                  p = (t − (T − D))/D,  t > T − D

W is the warm-up in updates, D the decay of wsd in updates, f the floor. The rate is lr at update s and f·lr at
update T, exactly; after update T it stays there. It depends on nothing but t and T, so a resumed run continues it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from earnest.errors import ConfigError
from earnest.settings import Checked, FieldProblem, setting

ROUNDING = 1e-9  # 0.07 · 100 is 7.000000000000001 in floating point, and means 7


@dataclass(frozen=True)
class RateSchedule(Checked):
    """A share of the learning rate for every update. A subclass has a ``kind`` and ``after_warmup``."""

    kind: ClassVar[str]

    warmup: float = setting(
        0.0, "updates in which the rate rises to lr: a whole number of them, or a share of all below 1", at_least=0.0
    )
    total: int | None = setting(
        None, "updates over which the schedule extends; none: all updates of the run", at_least=1
    )

    def validate(self) -> None:
        if self.warmup >= 1 and not isinstance(self.warmup, int):
            raise FieldProblem(
                f"warmup: must be a share of the updates below 1 or a whole number of updates, got {self.warmup!r}."
            )

    def share(self, t: int, total: int | None = None) -> float:
        """The rate of update ``t`` (from 1) of ``total``, as a share of lr; ``self.total`` goes before ``total``."""
        total = self.total or total
        if total is None:
            if self.open_ended:
                raise ConfigError(
                    f"schedule: {self.kind} needs the number of updates; give en.{type(self).__name__}(total=…), or "
                    "train with en.train."
                )
            total = t + int(self.warmup)  # any number that the warm-up fits into
        t, warm = min(t, total), self.warmup_updates(total)
        if t <= warm:
            return t / warm
        return self.after_warmup(t, max(warm, 1), total)

    def warmup_updates(self, total: int) -> int:
        """W: a share is rounded up, and leaves at least one update after the warm-up."""
        if self.warmup < 1:
            return min(rounded_up(self.warmup * total), total - 1)
        if self.warmup >= total:
            raise ConfigError(
                f"optimizer.schedule.warmup: {self.warmup} updates of warm-up do not fit into {total} updates; "
                "give fewer, or a share below 1."
            )
        return int(self.warmup)

    def after_warmup(self, t: int, start: int, total: int) -> float:
        """The share of update ``t``, at ``start`` = max(W, 1) or later."""
        raise NotImplementedError  # abstract: every kind defines it

    @property
    def open_ended(self) -> bool:
        """Whether the rates depend on the length of the run."""
        return self.total is None


@dataclass(frozen=True)
class Constant(RateSchedule):
    """Warm-up, then lr."""

    kind: ClassVar[str] = "constant"

    def after_warmup(self, t: int, start: int, total: int) -> float:
        return 1.0

    @property
    def open_ended(self) -> bool:
        return self.total is None and 0 < self.warmup < 1


@dataclass(frozen=True)
class FallingSchedule(RateSchedule):
    """A schedule that ends at floor·lr."""

    floor: float = setting(
        0.1, "the rate of the last update, as a share of lr; 0: that update does nothing", at_least=0.0, below=1.0
    )


@dataclass(frozen=True)
class Linear(FallingSchedule):
    """Warm-up, then a straight line from lr to floor·lr."""

    kind: ClassVar[str] = "linear"

    def after_warmup(self, t: int, start: int, total: int) -> float:
        return line(self.floor, progress(t, start, total))


@dataclass(frozen=True)
class Cosine(FallingSchedule):
    """Warm-up, then half a cosine from lr to floor·lr (arXiv 1608.03983, without restarts)."""

    kind: ClassVar[str] = "cosine"

    def after_warmup(self, t: int, start: int, total: int) -> float:
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress(t, start, total))) / 2


@dataclass(frozen=True)
class WSD(FallingSchedule):
    """Warm-up, stable, decay (arXiv 2404.06395): lr until the last ``decay`` of the run, then a line to floor·lr."""

    kind: ClassVar[str] = "wsd"

    decay: float = setting(0.2, "the share of all updates, at the end, in which the rate falls", above=0.0, at_most=1.0)

    def warmup_updates(self, total: int) -> int:
        warm = self.warmup if self.warmup < 1 else self.warmup / total
        if warm + self.decay > 1 + ROUNDING:
            raise ConfigError(
                f"optimizer.schedule.decay: warm-up ({warm:g} of the updates) and decay ({self.decay:g}) are more than "
                f"the whole of {total} updates; lower one of them."
            )
        return super().warmup_updates(total)

    def after_warmup(self, t: int, start: int, total: int) -> float:
        stable_until = total - min(rounded_up(self.decay * total), total - start)
        return 1.0 if t <= stable_until else line(self.floor, progress(t, stable_until, total))


AnySchedule = Constant | Linear | Cosine | WSD


def rounded_up(updates: float) -> int:
    return math.ceil(updates - ROUNDING)


def progress(t: int, start: int, end: int) -> float:
    """0 at ``start``, 1 at ``end``; a decay without a second update has not begun."""
    return (t - start) / (end - start) if end > start else 0.0


def line(floor: float, p: float) -> float:
    return floor + (1 - floor) * (1 - p)
