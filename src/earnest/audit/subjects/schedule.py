"""A learning-rate schedule: planned for optimizer steps, the same for one rank and for many.

lr(k, total) rises in the warm-up, is at its peak after it, and reaches its end at k = total, not before
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from earnest.audit.law import Law
from earnest.audit.subjects.base import judged
from earnest.audit.verdict import Finding


@dataclass
class Schedule:
    """``rates(total, ranks)`` -> the learning rate of every optimizer step that a run of ``total`` steps really
    takes."""

    rates: Callable[[int, int], Sequence[float]]
    peak: float
    final: float
    total: int = 40

    def check(self) -> Iterator[Finding]:
        one, many = list(self.rates(self.total, 1)), list(self.rates(self.total, 4))
        yield judged(
            "MR",
            "steps",
            f"{len(one)}",
            f"{self.total}",
            len(one) == self.total,
            "The schedule is stepped another number of times than there are updates.",
        )
        top = max(one)
        yield judged(
            "MR",
            "peak",
            f"{top:.3g}",
            f"{self.peak:.3g}",
            abs(top - self.peak) <= 0.1 * self.peak,
            "The peak is never reached.",
        )
        middle = one[len(one) // 2]
        low, high = sorted((self.peak, self.final))
        yield judged(
            "MR",
            "half way",
            f"{middle:.3g}",
            "between the peak and the end",
            low < middle <= high or self.peak == self.final,
            "Half way the schedule is at its end already: it counts batches, ranks or micro-batches as steps.",
        )
        room = 0.1 * self.peak
        yield judged(
            "MR",
            "end",
            f"{one[-1]:.3g}",
            f"{self.final:.3g}",
            abs(one[-1] - self.final) <= room,
            "The run ends before the schedule does, or long after.",
        )
        yield judged(
            "SE",
            "1 rank = 4 ranks",
            "equal" if one == many else "different",
            "equal",
            one == many,
            "The schedule depends on the number of ranks.",
        )


LAW = Law(
    code="MR",
    name="schedule (Schedule)",
    sentence="A schedule has as many steps as there are updates, reaches its peak and, at the end, its end; for one "
    "rank and for many.",
    needs="rates(total, ranks), peak, final",
    how="The learning rates of a whole run, for 1 rank and for 4.",
    traps="Peak and end may be missed by a tenth of the peak: warm-ups that start at 1/n do.",
    caught="a scheduler that is stepped once a process, a plan in micro-batches",
    check=Schedule.check,
)
