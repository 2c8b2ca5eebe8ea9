"""Learning rates over a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from earnest_audit.subjects.base import Subject
from earnest_audit.verdict import Finding

FLAT = 1e-6  # of the top: what rounding may let a rate rise by
EXACT = 1e-9  # of the peak: a rate of 0, up to rounding
ABOVE = 1.01  # times the declared peak, which may be a rounded number
RANKS = 4
STEEP, SMALL = 4, 0.02  # times the next falls (1 - √t begins with 2.4 times, 1/t with 3 times); of the peak


@dataclass
class Schedule(Subject, name="schedule"):
    """SCHEDULE: A schedule has as many steps as there are updates and reaches its peak and its final rate, for one rank
    and for many and for every group; a declared warm-up happens once.

    lr(k, total) rises in the warm-up (where one is declared) and never after it, is at its peak then, and reaches its
    end at k = total (or at ``ends``), not before, and is never below it after the peak; each parameter group has its
    own peak and end; another value of a setting gives other rates; ranks that average their gradients have one rate

    Needs: ``rates(total, ranks)`` -> the learning rate of every optimizer step that a run of ``total`` steps really
    takes; one number per step, or one per group: then ``peak``, ``final`` and ``warmup`` may have one per group too.
    ``warmup`` is the number of steps in which the rate rises. ``ends`` is the step at which the final rate is reached:
    ``total`` (after the last step), or an earlier one where it is then held. ``restarts=True`` where the rate rises
    again after the warm-up by design. ``settings`` (decay steps, a power, a floor) are numbers, handed to ``rates`` by
    name; each has to matter. ``of_rank(total, rank)`` -> the rates of one rank, where each rank computes its own.
    How: The learning rates of a whole run, for 1 rank and for 4, and with other values of each setting.
    Exceptions: The peak may be missed by a tenth (warm-ups that start at 1/n do), and exceeded by a hundredth. The
    final rate may be missed by a quarter of itself (of 0: by a tenth of the peak), or by one and a half times the last
    step's change. With restarts the warm-up ends at the first fall; the floor is checked after the last rise.
    Warns: (rows "half way" and "the first fall") a schedule that is at its end early by design, where ``ends`` declares
    when it is there; a decay that is steepest in its first step, or has its first stage directly after the warm-up.
    Detects: a scheduler that is stepped once per process, a plan in micro-batches, hi-ml #611 (one rate for all
    groups), a decay to 0 where a floor is declared, fairchem #1967 (a cosine that is not shifted by the warm-up)
    """

    rates: Callable[..., Sequence[float] | Sequence[Sequence[float]]]
    peak: float | Sequence[float]
    final: float | Sequence[float]
    total: int = 40
    warmup: int | Sequence[int] | None = None
    ends: int | None = None
    restarts: bool = False
    settings: Mapping[str, float] = field(default_factory=dict)
    of_rank: Callable[[int, int], Sequence[float] | Sequence[Sequence[float]]] | None = None

    def check(self) -> Iterator[Finding]:
        if any(w > self.total for w in _row(self.warmup or 0)):
            raise self.error(f"warmup={self.warmup}", f"it is longer than a run of {self.total} steps: give total=…")
        one, many = self._one(), list(self.rates(self.total, RANKS, **self.settings))
        why = "The schedule is stepped another number of times than there are updates."
        yield self.finding("steps", f"{len(one)}", f"{self.total}", len(one) == self.total, why)
        groups = [list(g) for g in zip(*(_row(r) for r in one), strict=True)]
        peaks, finals = (_spread(v, len(groups)) for v in (self.peak, self.final))
        warmups = [None] * len(groups) if self.warmup is None else _spread(self.warmup, len(groups))
        for number, (rates, peak, final, warmup) in enumerate(zip(groups, peaks, finals, warmups, strict=True)):
            of = f" (group {number})" if len(groups) > 1 else ""
            yield from self._group(of, rates, peak, final, warmup)
        if self.warmup is None:
            yield self.not_declared("warm-up", "warmup=…, in optimizer steps,")
        if self.ends is None and any(0 < final < peak for peak, final in zip(peaks, finals, strict=True)):
            yield self.not_declared("the last steps", "ends=…, the step at which the final rate is reached,")
        equal, why = "equal" if one == many else "different", "The schedule depends on the number of ranks."
        yield self.finding("1 rank = 4 ranks", equal, "equal", one == many, why)
        for name, value in self.settings.items():
            others = [value * 2, value // 2 if isinstance(value, int) else value / 2, value + 1]
            yield self.setting_matters(name, value, others, self._one, "it is read and not used, or overwritten.")
        if self.of_rank is not None:
            each = [list(self.of_rank(self.total, rank)) for rank in range(RANKS)]
            other = [f"rank {rank}" for rank, rates in enumerate(each) if rates != each[0]]
            more = " has other rates than rank 0: each applies its own to one averaged gradient, and weights drift."
            yield self.none("every rank", other, f"{len(other)} of {RANKS} ranks differ from rank 0", more)

    def _one(self, **changed: float) -> list[Any]:
        """The rates on one rank, with these settings changed."""
        return list(self.rates(self.total, 1, **{**self.settings, **changed}))

    def _group(self, of: str, one: list[float], peak: float, final: float, warmup: float | None) -> Iterator[Finding]:
        top, middle, (low, high) = max(one), one[len(one) // 2], sorted((peak, final))
        why = "The peak is missed, exceeded or another group's: one rate for all. (A rounded peak: declare it exactly.)"
        holds, expected = 0.9 * peak <= top <= ABOVE * peak, f"{0.9 * peak:.3g} to {ABOVE * peak:.3g}"
        yield self.finding(f"peak{of}", f"{top:.3g}", expected, holds, why)
        if not self.restarts:
            holds = low < middle <= high or peak == final or (self.ends is not None and self.ends <= len(one) // 2)
            why = "Half way the schedule is at its end already: it counts batches, ranks or micro-batches as steps."
            row = self.finding(f"half way{of}", f"{middle:.3g}", "between the peak and the end", holds, why)
            yield self.law.doubtful(row)
        # A linear decay is one step above its end in its last step, and that is much in a short run.
        last, near = abs(one[-1] - one[-2]) if len(one) > 1 else 0.0, 0.25 * final if final else 0.1 * peak
        ends = abs(one[-1] - final) <= max(near, 1.5 * last)
        why = "The run ends before the schedule does, or long after; or it has another floor than the declared one."
        yield self.finding(f"end{of}", f"{one[-1]:.3g}", f"{final:.3g}", ends, why)
        # The warm-up is over at the top, or, with restarts, before the first fall.
        fall = next((k for k, (a, b) in enumerate(pairwise(one)) if b < a), len(one) - 1)
        at = one.index(one[fall] if self.restarts else top)
        rises = [k + 1 for k, (a, b) in enumerate(pairwise(one)) if k >= at and b > a + FLAT * top]
        if ends and final < peak and (final == 0 or self.ends is not None):
            # A decay over i / n is held at i = n - 1: above its end by no more than its last change.
            change = next((abs(a - b) for a, b in pairwise(reversed(one)) if abs(a - b) > EXACT * peak), 0.0)
            held = final if self.ends is None or one[-1] - final > 1.5 * change else max(final, one[-1])
            above = next((n for n, rate in enumerate(reversed(one)) if rate > held + EXACT * peak), len(one))
            planned, allowed = len(one) if self.ends is None else self.ends, max(1, len(one) // 50)
            early = planned - 1 - (len(one) - above)
            reached = f"reached at step {len(one) - above + 1} of {len(one)}" if above else "never reached exactly"
            holds = early <= allowed and (self.ends is None or early >= -1 - allowed)
            why = "The decay ends too early or too late: its length lacks the warm-up, or it has another floor."
            expected = f"at step {planned}, or up to {allowed} before"
            yield self.finding(f"the last steps{of}", f"the final rate is {reached}", expected, holds, why)
        if ends:
            least = min(one[rises[-1] if self.restarts and rises else one.index(top) :])
            why = "The rate falls below its declared end: the floor is not applied, or only at the last step."
            measured = f"the least rate after the peak is {least:.3g}"
            yield self.finding(f"floor{of}", measured, f"{low:.3g} or above", least >= low - max(FLAT * top, last), why)
        if warmup is None:
            return
        # The top comes at the end of the warm-up; a step early or late is how steps are counted.
        rising = all(a <= b for a, b in pairwise(one[: at + 1]))
        holds = rising and abs(at - warmup) <= 1 + warmup // 4 and (warmup < 2 or one[0] < one[at])
        why = "The warm-up is not the declared one: it is read as 0, or counted in epochs, ranks or micro-batches."
        measured = f"the top is at step {at}" + ("" if rising else ", and the rate falls before it")
        yield self.finding(f"warm-up{of}", measured, f"at step {warmup}, and a rise to it", holds, why)
        if not self.restarts:
            why = "The rate rises again: a cycle of another length, or a second warm-up. By design: restarts=True."
            measured = f"it rises again at step {rises[0]}" if rises else "it never rises again"
            yield self.finding(f"after the warm-up{of}", measured, "it never rises again", not rises, why)
            first, *later = (a - b for a, b in pairwise([*one[at : at + 4], one[-1]]))
            holds = warmup < 2 or first <= max(SMALL * top, STEEP * max(later[:2], default=first))
            why = "The rate jumps down where the warm-up ends: the decay is not shifted by it."
            row = self.finding(f"the first fall{of}", f"by {first:.3g}", f"≤ {STEEP} times the next ones", holds, why)
            yield self.law.doubtful(row)


def _row(rates: Any) -> tuple[float, ...]:
    return tuple(map(float, rates)) if isinstance(rates, Sequence) else (float(rates),)


def _spread(value: float | Sequence[float], groups: int) -> list[float]:
    found = list(value) if isinstance(value, Sequence) else [value] * groups
    if len(found) != groups:
        raise ValueError(f"{len(found)} numbers for {groups} groups: give one number, or one per group.")
    return found
