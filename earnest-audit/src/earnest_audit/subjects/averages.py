"""Averages of weights: a moving one, replicas of an outer step, and the mean of a random thinning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from earnest_audit.precision import COARSE, rounding
from earnest_audit.restore import seeded
from earnest_audit.subjects.base import Subject, copied, gap, largest
from earnest_audit.verdict import Finding

SMALL = 2.0**-4  # exact in every dtype
USUAL = 1e-3  # what a decay of 0.999 leaves
WARM = 2000  # updates after which every usual warm-up of a decay is over at SMALL
MOST = 4096  # calls, however small a rate is
OFF = "{} of the way off"
RATES = ("_lr", "_learning_rate", "_step_size", "_eta")
THOUSANDTH = 2.0**-10  # of a weight: nothing in bf16, and 8000 units in the last place of fp32
STILL = 1e-30  # a momentum of nothing, for optimizers that refuse 0 (Nesterov's)
Average = Callable[[Tensor, Tensor, float], Tensor | None]


@dataclass
class Ema(Subject, name="moving average"):
    """EMA: Rate 0 keeps an average of weights, rate 1 copies the current ones, a small rate moves it a little, many
    such updates add up; equal weights stay equal, and the current weights are not modified.

    update(average, current, rate) = average + rate·(current - average)

    Needs: ``update(average, current, rate)`` changes ``average`` in place, or returns the new one. ``rate`` is the
    weight of the current weights: where the code has a decay, hand it 1 - rate. An ``update`` that counts its calls (a
    decay that warms up) is an object that can be deep-copied. ``dtype`` is that of the average and the current weights.
    The field ``rate`` is that of the run, whose updates have to add up: in 16 bits a small one is rounded away.
    ``every``: only each such call moves the average, from the first one on; it moves by ``rate``, or by what a rate for
    each of the calls comes to, 1 - (1 - rate)ᵉᵛᵉʳʸ.
    How: Random weights at three rates, then 1/rate moves (4096 calls at most), which must bring the average at least
    half as far as they should. The tolerance is rounding in the dtype.
    Exceptions: A decay that warms up is judged after 2000 updates, where rate 0 may still move it a little.
    Detects: TRL #4935 (rate and decay swapped), diffusers #1864 (a decay that overwrites itself), 0.999 in bf16
    """

    update: Average
    size: int = 7
    dtype: torch.dtype = torch.float32
    rate: float | None = None
    every: int = 1

    def check(self) -> Iterator[Finding]:
        rng = torch.Generator().manual_seed(0)
        old, new = (torch.randn(self.size, generator=rng).to(self.dtype) for _ in range(2))
        warmed, _ = self._run(self.update, old, new, SMALL, WARM)
        rows, later = list(self._rows(self.update, old, new)), list(self._rows(warmed, old, new, warm=True))
        fails = [any(f.outcome == "fails" for f in found) for found in (rows, later)]
        yield from later if fails == [True, False] else rows
        update, why = copied(self.update), "An update of the average writes into the weights that are trained."
        yield self.untouched(lambda current: update(old.clone(), current, SMALL), {"current weights": new}, why)[1]
        # Two updates at one rate leave (1 - rate)² of the way; a decay that warms up does so later.
        off = min(self._off(update, old, new, SMALL, moves=2) for update in (self.update, warmed))
        why = "The second update is not like the first: it changes its own rate, or keeps something of the first."
        yield self.agrees(f"rate {SMALL:g}, a second time", off, 2 * rounding(old), why, OFF)
        yield self._adds_up(old, new)

    def _rows(self, update: Average, old: Tensor, new: Tensor, warm: bool = False) -> Iterator[Finding]:
        """``warm``: the update has been made many times. A warm-up holds the rate above 0 for ever, and ever less."""
        why = "Rate and decay are swapped, the result is discarded, or the two weights do not add to 1."
        for rate in (0.0, 1.0, SMALL):
            off = self._off(update, old, new, rate)
            room, after = SMALL if warm and rate == 0 else rounding(old), f", after {WARM} updates" if warm else ""
            yield self.agrees(f"rate {rate:g}{after}", off, room, why, OFF)

    def _off(self, update: Average, old: Tensor, new: Tensor, rate: float, moves: int = 1) -> float:
        """How far from the right average: a move has the rate of one call, or of ``every`` calls."""
        found = self._run(update, old, new, rate, 1 + (moves - 1) * self.every)[1]
        meant = (new + (1 - rate) ** (moves * calls) * (old - new) for calls in (1, self.every))
        return min(largest(gap(found, wanted)) for wanted in meant) / largest(gap(old, new))

    def _adds_up(self, old: Tensor, new: Tensor) -> Finding:
        """1/rate moves go two thirds of the way; at least half of that is required."""
        if self.rate is None and torch.finfo(self.dtype).eps > COARSE:
            return self.not_declared("many updates", "rate=…, that of the run,")
        rate = USUAL if self.rate is None else self.rate
        calls = min(MOST, math.ceil(1 / rate) * self.every) if rate > 0 else 0
        _, average = self._run(self.update, old, new, rate, calls)
        way = (new - old).double()
        share = float(((average - old).double() * way).sum() / (way * way).sum())
        wanted = 0.5 * (1 - (1 - rate) ** math.ceil(calls / self.every))
        subject, measured = f"many updates at rate {rate:g}", f"{share:.2g} of the way after {calls}"
        why = f"Updates at this rate are rounded away in {self.dtype}: the average stays constant. Keep it in fp32."
        return self.finding(subject, measured, f"≥ {wanted:.2g}", share >= wanted, why)

    @staticmethod
    def _run(update: Average, old: Tensor, new: Tensor, rate: float, calls: int = 1) -> tuple[Average, Tensor]:
        """A copy of the update after ``calls`` calls, and the average that they leave."""
        update, average = copied(update), old.clone()
        with seeded(0):
            for _ in range(calls):
                given = update(average, new.clone(), rate)
                average = given if isinstance(given, Tensor) else average
        return update, average


@dataclass
class OuterStep(Subject, name="outer step"):
    """OUTER: At outer learning rate 1 and momentum 0 one replica ends on its own weights and two on their mean, also
    after small moves; a second round begins at its own start; every setting matters, and momentum carries over to the
    next round.

    outer lr 1, momentum 0   one replica lands on its own weights, two on their mean, also by a thousandth of a weight
    outer lr ½, momentum 0   the second round too moves along mean - start
    settings                 matter; a momentum carries over from the round before

    Needs: ``step(start, locals, **settings)`` -> new global weights of a local-SGD round with outer SGD. ``knobs`` are
    the settings of the run; for the mean, momentum is set to 0 and a learning rate to 1, by name, and others to their
    values in ``plain``, at which they do nothing (a decay of 0, a bound of 1e9). ``precision`` is what replicas send or
    the step returns, where that is coarser than fp32. A ``step`` with a memory (momentum) can be deep-copied.
    How: Random weights in fp32; settings are tried over two rounds. The tolerance is rounding of the largest weight: in
    16 bits four units. Small moves are then not checked.
    Exceptions: A momentum inside the step must be a setting; without Nesterov it acts from the second round on.
    Detects: a pseudo-gradient with the wrong sign, torchft #233 (alpha), a backup that is never refreshed
    """

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
            yield self.setting_matters(knob, value, others, run, why)
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
                yield self.not_applicable(subject, f"not their mean, with {', '.join(acting)}", why)
            else:
                yield from rows
            return
        why = "The step refuses momentum 0 and learning rate 1, so where replicas land is not checked."
        yield self.not_applicable(subject, f"raises {refused}", why)

    def _landings(self, start: Tensor, one: Tensor, two: Tensor, knobs: Mapping[str, float]) -> Iterator[Finding]:
        unit = torch.finfo(self.precision or start.dtype).eps
        near = min(rounding(start, precision=self.precision), max(rounding(start), 4 * unit))
        room = near * max(float(t.abs().max()) for t in (start, one, two))
        why = "Replicas do not end on their mean: a pseudo-gradient with the wrong sign, or one replica is left out. A "
        why += "momentum or a learning rate inside the step has to be a setting (momentum=…, lr=…)."
        for who, of, whose in (("one replica", [one], "the local weights"), ("two replicas", [one, two], "their mean")):
            off = largest(gap(self._rounds(start, [of], knobs)[-1], torch.stack(of).mean(0)))
            yield self.agrees(f"{who}, outer lr 1", off, room, why, f"lands {{}} from {whose}")
        # A backup of an earlier round cancels at learning rate 1.
        half = {**knobs, **{k: 0.5 for k in knobs if _is_rate(k) and k not in self.plain}}
        a, b = self._rounds(start, [[one], [two]], half)
        turned = [1 - float(torch.cosine_similarity(*pair, 0)) for pair in ((a - start, one - start), (b - a, two - a))]
        if turned[0] <= near**2 + rounding(start):
            why = "The second round does not begin at its start: what is kept of the weights is not refreshed."
            yield self.agrees("a second round", turned[1], near**2 + rounding(start), why, "1 - cosine is {}")
        if self.precision is not None:
            yield self.not_applicable("a small move", f"sent or kept in {self.precision}, by declaration")
        else:  # a move of a thousandth of every weight, which is more than most outer steps are
            start = start.abs().clamp_min(2**-6)
            moved = start * (1 + THOUSANDTH * one.sign())
            off = float(((self._rounds(start, [[moved]], knobs)[-1] - moved) / (THOUSANDTH * start)).abs().max())
            why = "A move of a thousandth of a weight is rounded away in 16 bits. (Intended: declare precision=…)"
            yield self.agrees("a small move", off, rounding(start) / THOUSANDTH, why, "off by {} of it")

    def _remembers(self, knob: str, start: Tensor, one: Tensor, two: Tensor) -> Iterator[Finding]:
        """A momentum that takes the first step further (Nesterov's) has a memory; an average of weights has none."""
        try:
            first = self._rounds(start, [[one]], {**self.knobs, knob: STILL})[-1]
        except Exception:
            return
        landed, second = self._rounds(start, [[one], [two]], self.knobs)
        if float((landed - start).norm()) <= float((first - start).norm()) * (1 + rounding(start)):
            return
        forgot = torch.equal(second, self._rounds(landed, [[two]], self.knobs)[-1])
        measured = f"the second round is {'' if forgot else 'not '}like a first one"
        why = f"{knob} takes a step further and keeps nothing of it: its memory is made anew every round."
        yield self.finding(f"{knob} remembers", measured, "the first round is in the second", not forgot, why)

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
    return "inner" not in knob.lower() and f"_{knob.lower()}".endswith(RATES)


@dataclass
class Unbiased(Subject, name="thinning"):
    """UNBIASED: The mean of a random thinning is its input, at every setting.

    E[f(x)] = x

    Needs: ``fn(x, setting)`` thins or rounds x at random; its mean over many draws is x at every setting.
    How: Many draws of numbers that 16 bits cannot hold; within six standard errors.
    Exceptions: Six standard errors of 22 numbers: one false alarm in about twenty million audits.
    Detects: PEFT #3152 (DARE's rescaling is discarded), OneTrainer #994 (stochastic rounding that truncates)
    """

    fn: Callable[[Tensor, float], Tensor]
    settings: Sequence[float] = (0.3, 0.7)
    draws: int = 2000

    def check(self) -> Iterator[Finding]:
        x = torch.linspace(-2, 3, 11) * 1.0037 + 0.0019  # no dtype of 16 bits holds these
        for setting in self.settings:
            with seeded(0):
                drawn = [self.fn(x.clone(), setting) for _ in range(self.draws)]
            total = torch.stack(drawn).double()
            mean, spread = total.mean(0), total.std(0) / self.draws**0.5
            # Rounding to nearest, where the result has fewer bits than the input, is no bias of the draw.
            grain = torch.finfo(drawn[0].dtype).eps / 2 if drawn[0].is_floating_point() else 0.0
            off = float(((mean - x).abs() / (6 * spread + x.abs() * grain + 1e-6)).max())
            why = "The mean is not the input: survivors are not rescaled, or a stochastic rounding truncates."
            yield self.agrees(f"mean at {setting}", off, 1.0, why, "{} × six standard errors from the input")
