"""OUTER: At outer learning rate 1 and momentum 0 one replica ends on its own weights and two on their mean, also after
small moves; every setting matters, and momentum carries over to the next round.

outer lr 1, momentum 0   one replica lands on its own weights, two on their mean, also by a thousandth of a weight
settings                 matter; a momentum carries over from the round before

Needs: step(start, locals, **settings); precision where replicas send 16 bits; plain where settings keep replicas from
their mean
How: Random weights in fp32, each time from a copy of the step; settings named like a momentum or a learning rate are
set to 0 and 1, others to what plain declares; settings are tried over two rounds. The tolerance is
rounding of the largest weight.
Exceptions: A momentum inside the step must be a setting; without Nesterov it acts from the second round on. Global
weights in 16 bits are declared by precision.
Detects: a pseudo-gradient with the wrong sign, torchft #233 (alpha)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from earnest_audit.law import Law
from earnest_audit.precision import rounding
from earnest_audit.subjects.base import copied, setting_matters
from earnest_audit.verdict import Finding

RATES = ("lr", "learning_rate", "step_size", "eta")
SMALL = 2.0**-10  # of a weight: nothing in bf16, and 8000 units in the last place of fp32
STILL = 1e-30  # a momentum of nothing, for optimizers that refuse 0 (Nesterov's)

LANDS = (
    "It does not: the pseudo-gradient has the wrong sign, or mixing is off. A momentum or a learning rate that the "
    "step has inside is to be a setting (momentum=…, lr=…)."
)


@dataclass
class OuterStep:
    """``step(start, locals, **settings)`` -> new global weights of a local-SGD round with outer SGD. ``knobs`` are
    those of the run: where replicas have to land on their mean, momentum is set to 0 and a learning rate to 1, by name,
    and others to their values in ``plain``, at which they do nothing (a decay of 0, a bound of 1e9).
    ``precision`` is what replicas send or the step gives back, where that is coarser than the weights, which are fp32.
    A ``step`` with a memory (momentum) is an object that can be deep-copied: every round of the audit begins from a
    copy."""

    step: Callable[..., Tensor]
    knobs: Mapping[str, float] = field(default_factory=dict)
    size: int = 7
    precision: torch.dtype | None = None
    plain: Mapping[str, float] = field(default_factory=dict)

    def check(self) -> Iterator[Finding]:
        rng = torch.Generator().manual_seed(0)
        weights = start, one, two = tuple(torch.randn(self.size, generator=rng) for _ in range(3))
        self._rounds(start, [[one]], self.knobs)  # as it is: what this raises is the user's to see
        yield from self._means(*weights)
        # Plain momentum acts from the second round on; mixing shows where replicas differ.
        ways = ([[one], [two]], [[one, two], [two, start]])
        why = "its result is discarded (not in place?), or its memory is lost every round."

        def run(**changed: float) -> list[list[Tensor]]:
            return [self._rounds(start, way, {**self.knobs, **changed}) for way in ways]

        for knob, value in self.knobs.items():
            others = [not value] if isinstance(value, bool) else [value + 0.3, value - 0.3, value / 2]
            yield setting_matters(LAW, knob, value, others, run, why)
            if _is_momentum(knob) and value > 0:
                yield from self._remembers(knob, *weights)

    def _means(self, start: Tensor, one: Tensor, two: Tensor) -> Iterator[Finding]:
        """Momentum 0 (or nothing) and learning rate 1, by name; the others as they are declared to do nothing."""
        momenta = [k for k in self.knobs if _is_momentum(k)]
        plain = {**self.knobs, **{k: 1.0 for k in self.knobs if _is_rate(k)}, **self.plain}
        acting = [k for k, v in self.knobs.items() if v and not (k in momenta or _is_rate(k) or k in self.plain)]
        subject, refused = "replicas, outer lr 1", ""
        for still in (0.0, STILL):
            try:
                rows = list(self._landings(start, one, two, {**plain, **dict.fromkeys(momenta, still)}))
            except Exception as error:
                refused = type(error).__name__
                continue
            if acting and any(row.outcome == "fails" for row in rows):
                why = f"Declare plain=… with the values of {', '.join(acting)} at which the step is a plain mean."
                yield LAW.not_applicable(subject, f"not their mean, with {', '.join(acting)}", why)
            else:
                yield from rows
            return
        why = "The step refuses momentum 0 and learning rate 1, so where replicas land is not checked."
        yield LAW.not_applicable(subject, f"raises {refused}", why)

    def _landings(self, start: Tensor, one: Tensor, two: Tensor, knobs: Mapping[str, float]) -> Iterator[Finding]:
        room = rounding(start, precision=self.precision) * max(float(t.abs().max()) for t in (start, one, two))
        for subject, locals_, whose, meaning in (
            ("one replica, outer lr 1", [one], "the local weights", f"A replica must end on its own weights. {LANDS}"),
            ("two replicas, outer lr 1", [one, two], "their mean", "Two replicas do not end on their mean: one is left "
             "out, or the average is not over members."),
        ):  # fmt: skip
            landed = self._rounds(start, [locals_], knobs)[-1]
            off = float((landed - torch.stack(locals_).mean(0)).abs().max())
            yield LAW.agrees(subject, off, room, meaning, f"lands {{}} from {whose}")
        if self.precision is None:  # a move of a thousandth of every weight, which is more than most outer steps are
            start = start.abs().clamp_min(2**-6)
            moved = start * (1 + SMALL * one.sign())
            landed = self._rounds(start, [[moved]], knobs)[-1]
            off = float(((landed - moved) / (SMALL * start)).abs().max())
            yield LAW.agrees(
                "a small move", off, rounding(start) / SMALL,
                "A move of a thousandth of a weight is lost: the global weights, or what is sent, are kept in 16 "
                "bits, where it is rounded away. (Where that is intended, declare precision=…)",
                "off by {} of it",
            )  # fmt: skip

    def _remembers(self, knob: str, start: Tensor, one: Tensor, two: Tensor) -> Iterator[Finding]:
        """A momentum that takes the first step further than without it (Nesterov's) has a memory; what only shortens
        steps may be an average of weights, which has none."""
        try:
            first = self._rounds(start, [[one]], {**self.knobs, knob: STILL})[-1]
        except Exception:
            return
        landed, second = self._rounds(start, [[one], [two]], self.knobs)
        if float((landed - start).norm()) <= float((first - start).norm()) * (1 + rounding(start)):
            return
        forgot = torch.equal(second, self._rounds(landed, [[two]], self.knobs)[-1])
        yield LAW.finding(
            f"{knob} remembers", "the second round is a first one" if forgot else "the second is none",
            "the first round is in the second", not forgot,
            f"{knob} takes a step further and keeps nothing of it: its memory is made anew every round.",
        )  # fmt: skip

    def _rounds(self, start: Tensor, ends: Sequence[Sequence[Tensor]], knobs: Mapping[str, float]) -> list[Tensor]:
        """The global weights after each round, by a step without a past."""
        step, found = copied(self.step), list[Tensor]()
        for locals_ in ends:
            start = step(start.clone(), [t.clone() for t in locals_], **knobs).detach().clone()
            found.append(start)
        return found


def _is_momentum(knob: str) -> bool:
    return "momentum" in knob.lower() and "nesterov" not in knob.lower()


def _is_rate(knob: str) -> bool:
    name = knob.lower()
    return "inner" not in name and any(name == r or name.endswith(f"_{r}") for r in RATES)


LAW = Law("OUTER", "outer step (OuterStep)", __doc__, OuterStep.check)
