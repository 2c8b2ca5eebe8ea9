"""Advantages that are made of the rewards of groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from earnest_audit.errors import SubjectError
from earnest_audit.precision import rounding
from earnest_audit.subjects.base import Subject
from earnest_audit.verdict import Finding

SHIFT = 5.0
STABILISER = 1e-4  # the largest constant that public code adds to a standard deviation
NAMES = 100  # what groups are called from, where their names are changed
NOISE = 0.1  # of the usual advantages: what rounding may become in a group without a signal
EXACT = (0.0, 1.0)  # values that no mean rounds
ROUNDS = 0.95  # its square is rounded
EQUAL = ((7, 0.7), (8, 0.7), (6, 0.1), (5, 1.0))  # seven times 0.7, added up and divided by seven, is not 0.7 in fp32


@dataclass
class AdvantageEstimator(Subject, name="advantages"):
    """ADV: A constant on a group's rewards changes nothing, groups are independent, a group sums to 0, scaling has the
    declared effect, order and names do not matter, equal rewards give 0, the only right answer is not below 0 and above
    the wrong ones, a missing reward does not become a number, inputs are not modified.

    shift     + a constant on one group's rewards changes nothing (but a common factor, where it divides by the batch)
    locality  a change in one group leaves the others alone (likewise)
    zero sum  Σ over a group is 0, where the division is by one number per group
    scale     rewards × 2: the same (scale="free", divided by a std) or × 2 (scale="equal")
    order     permuting the rows permutes the advantages
    equal     equal rewards give 0, also where their mean is rounded; one different reward gives no giant
    sign      one right answer in a group is not below 0, the wrong ones not above, and it is above them
    names     other names of the groups (100, 101, …) change nothing
    inputs    are not written into
    missing   a NaN reward raises, stays NaN, or is left out, alone or with its group: it does not become a number

    Needs: ``fn(rewards, groups)`` -> advantages, and ``scale``: "free" where a factor on all rewards changes nothing.
    ``over`` is what it is centred over: "group", "batch", or "none" (then shift and sum do not apply).
    ``scaled_over`` is what it is divided by, where that is another: "batch" (one number for all groups), "row" (each
    row's own, such as the spread of the others), or "mean" (a group's mean, of rewards above 0: a shift then changes
    the size). ``baseline``: "other" where it is not the mean (a median): the sum is then not checked. ``values``: the
    only rewards that occur, such as (0.0, 1.0): what leads out of them is not tried. ``interleaved=False``: a group's
    rows stand together, ``size`` each. ``in_place=True``: it writes into the rewards by design.
    How: Rewards or groups are edited, one way at a time. The tolerance is rounding over the smallest spread, plus the
    usual constant (up to 1e-4) in a denominator.
    Exceptions: Rewards that never round (0 and 1) need no floor under the spread: values=(0.0, 1.0).
    Detects: one sample per prompt (all advantages 0), statistics along the wrong axis, groups by position, NeMo-RL
    #1518 (spread of the others), NeMo-RL #4158 (equal rewards become ±1)
    """

    fn: Callable[[Tensor, Tensor], Tensor | Sequence[Any]]
    scale: Literal["free", "equal"]
    over: Literal["group", "batch", "none"] = "group"
    groups: int = 3
    size: int = 4
    interleaved: bool = True
    seed: int = 0
    scaled_over: Literal["group", "batch", "row", "mean"] | None = None
    values: Sequence[float] | None = None
    baseline: Literal["mean", "other"] = "mean"
    in_place: bool = False
    _room = _usual = 0.0  # ``check`` sets them by its first call: the tolerance, and the largest advantage

    def check(self) -> Iterator[Finding]:
        rng = torch.Generator().manual_seed(self.seed)
        groups = torch.arange(self.groups).repeat_interleave(self.size)
        if self.interleaved:  # rows of a group need not stand together, unless the estimator assumes it
            groups = groups[torch.randperm(len(groups), generator=rng)]
        rewards = self._draw(groups, rng)
        why = "The estimator writes into its inputs: what is read later is no reward. (Or declare in_place=True.)"
        given, unchanged = self.untouched(self.fn, {"rewards": rewards, "groups": groups}, why)
        given = torch.as_tensor(given).detach().reshape(-1).clone()
        if given.shape != rewards.shape:
            raise self.error("fn", f"it returned {len(given)} advantages of {len(rewards)} rewards")
        self._room, base = self._rounded(rewards, groups, given), given.float()
        self._usual = float(base.abs().max())
        why = "Every advantage is 0: nothing is learned."
        yield self.finding("advantages", f"largest {self._usual:.3g}", "not all 0", self._usual > 0, why)
        if not self.in_place:
            yield unchanged
        if self.over == "group":
            yield from self._local(rewards, groups, base)
        if self.over == "batch":
            why = "A constant on all rewards moves the advantages: they are not centred."
            yield self._gives("shift of all rewards", (rewards + SHIFT, groups), base, why)
        why = "Scaling the rewards has another effect than declared: the division by a spread is in the wrong mode."
        scaled = base if self.scale == "free" else base * 2
        yield self._gives(f"scale ({self.scale})", (rewards * 2, groups), scaled, why)
        order = self._order(rng)
        why = "The order of the rows matters: a statistic is taken along the wrong axis, or groups are found by place."
        yield self._gives("permuted rows", (rewards[order], groups[order]), base[order], why)
        if self.over == "group":
            yield self._centred(groups, base)
        if self.over != "none":
            yield self._equal()
            yield from self._one_of_many(rewards, groups)
        yield self._missing(rewards, groups)

    def _gives(self, subject: str, edited: tuple[Tensor, Tensor], wanted: Tensor, meaning: str,
               changed: Tensor | None = None, others: bool = False, refusable: bool = False) -> Finding:  # fmt: skip
        """Edited rewards and groups give the ``wanted`` advantages; up to a factor where ``changed`` rows have other
        rewards, and so another divisor. ``others``: without these. ``refusable``: an estimator may raise instead."""
        values = torch.tensor(list(map(float, self.values or ()))).to(edited[0])
        if self.values is not None and not bool(torch.isin(edited[0], values).all()):
            return self.not_applicable(subject, "leads out of the declared values")
        try:
            found = self._run(*edited).float()
        except SubjectError:
            raise
        except Exception as error:
            return self.refused(subject, error) if refusable else self.unchecked(subject, error)
        if changed is not None:
            rows = ~changed if others else torch.ones_like(changed)
            wanted, found = wanted[rows], self._alike(found[rows], wanted[rows], changed[rows])
        return self.agrees(subject, self._off(found, wanted), self._room, meaning)

    def _off(self, found: Tensor, wanted: Tensor) -> float:
        return float((wanted.float() - found.float()).abs().max()) / max(self._usual, 1e-12)

    def _local(self, rewards: Tensor, groups: Tensor, base: Tensor) -> Iterator[Finding]:
        """What is done to one group, or to the groups' names, stays there."""
        first = groups == groups[0]
        why = "A constant on one prompt's rewards moves advantages: groups are cut wrongly, or a mean or a spread is "
        why += 'over all prompts. (By design: over="batch", or scaled_over="batch" or "mean".)'
        yield self._gives("shift of one group", (rewards + SHIFT * first.float(), groups), base, why, first)
        why = "Groups with other names have other advantages: a name is taken for a place. Raise, or count the names."
        yield self._gives("other names of the groups", (rewards, groups + NAMES), base, why, refusable=True)
        if self.groups < 2:
            return
        other = torch.where(first, rewards * 3 - 1, rewards)
        if self.values is not None:  # one more right answer: three rows or more still have a spread
            low, high = self._ends()
            other = rewards.index_fill(0, (first & (rewards == low)).nonzero()[0], high)
        why = "Another prompt's rewards reach into this one's advantages. (By design: declare scaled_over=\"batch\".)"
        yield self._gives("group locality", (other, groups), base, why, first, others=True)
        edited, last = (rewards[:-1], groups[:-1]), groups[:-1] == groups[-1]
        why = "With a row missing, other groups' advantages change: they are cut by place. Raise where one is not full."
        yield self._gives("groups of unequal size", edited, base[:-1], why, last, others=True, refusable=True)

    def _centred(self, groups: Tensor, base: Tensor) -> Finding:
        if self.scaled_over == "row" or self.baseline == "other":
            return self.not_applicable("sum over a group", "each row has its own divisor, or the baseline is no mean")
        sums = max(abs(float(base[groups == g].sum())) for g in range(self.groups))
        near = self._room * self._usual * self.size
        why = 'Advantages of a group do not cancel: the baseline is not its mean. (A median: declare baseline="other".)'
        return self.finding("sum over a group", f"{sums:.2g}", f"0, up to {near:.1g}", sums <= near, why)

    def _draw(self, groups: Tensor, rng: torch.Generator) -> Tensor:
        """Normal, or of the declared values: the smallest and the largest twice in each group, which keeps a spread."""
        if self.values is None:
            return (torch.rand if self.scaled_over == "mean" else torch.randn)(len(groups), generator=rng)
        low, high, values = *self._ends(), torch.tensor(list(map(float, self.values)))
        rewards = values[torch.randint(len(values), (len(groups),), generator=rng)]
        for g in groups.unique():
            rows = (groups == g).nonzero().flatten()
            rows = rows[torch.randperm(len(rows), generator=rng)]
            rewards[rows[:4]] = torch.tensor([low, high, low, high])[: len(rows[:4])]
        return rewards

    def _ends(self) -> tuple[float, float]:
        """A wrong answer's reward and a right one's."""
        values = EXACT if self.values is None else sorted(set(map(float, self.values)))
        if len(values) < 2:
            raise self.error(f"values={self.values}", "two different rewards or more are needed, or none")
        return values[0], values[-1]

    def _order(self, rng: torch.Generator) -> Tensor:
        """Any; where rows stand by place, whole groups change places, and rows within them."""
        if self.interleaved:
            return torch.randperm(self.groups * self.size, generator=rng)
        groups = torch.randperm(self.groups, generator=rng).tolist()
        return torch.cat([torch.randperm(self.size, generator=rng) + g * self.size for g in groups])

    def _alike(self, found: Tensor, base: Tensor, changed: Tensor) -> Tensor:
        """Where one number divides the whole batch, another batch may have another one: a factor above 0 is allowed.
        Where a group's mean divides it, so it is for the rows of the group that was ``changed``."""
        if self.scaled_over not in ("batch", "mean"):
            return found
        free = torch.ones_like(changed) if self.scaled_over == "batch" else changed
        mine, theirs = base[free], found[free]
        factor = float(mine.dot(theirs)) / max(float(theirs.dot(theirs)), 1e-30)
        return torch.where(free & (factor > 0), found * factor, found)

    def _equal(self) -> Finding:
        """Equal rewards, in group sizes and values whose mean is rounded: there rounding is divided by rounding."""
        subject, room = "equal rewards", NOISE * self._usual
        sizes = [(self.size, 0.7), *EQUAL]
        cases = [(n, float(v)) for n, _ in sizes for v in self.values or EXACT]
        tried = {case: self._at_equal(*case) for case in cases + (sizes if self.values is None else [])}
        found = {case: largest for case, largest in tried.items() if largest is not None}
        if not found:
            return self.not_applicable(subject, "one group alone is refused")
        rounds = [c for c, x in found.items() if self.values is None and c[1] not in EXACT and math.isfinite(x)]
        (size, value), worst = max(((c, x) for c, x in found.items() if c not in rounds), key=lambda case: case[1])
        rounded = max((found[case] for case in rounds), default=0.0)
        if worst <= room < rounded:  # right for rewards of 0 and 1, which is what most graders give
            why = "Equal rewards that round are trained on: add 1e-6 to the spread, or declare values=(…) that occur."
            measured = f"0 for 0 and 1, but up to {rounded:.2g} for values that round (0.7)"
            return self.finding(subject, measured, "0", "not declared", why)
        why = "Equal answers get advantages, rounding over rounding. Add 1e-6 to the spread, or set such groups to 0."
        measured = f"largest {worst:.2g} for {size} rewards of {value:g}"
        return self.finding(subject, measured, f"0, up to {room:.1g}", worst <= room, why)

    def _at_equal(self, size: int, value: float) -> float | None:
        """The largest advantage in a group of equal rewards; None where groups of this size are refused."""
        rewards, groups = torch.full((size,), value), torch.zeros(size, dtype=torch.long)
        if self.over == "group" and self.scaled_over == "batch":  # so that the batch has a spread
            other = value + 1 if self.values is None else next(v for v in self._ends() if v != value)
            spread = torch.where(torch.arange(size) % 2 == 0, value, other)
            rewards, groups = torch.cat([rewards, spread]), torch.arange(2 * size) // size
        try:
            return _largest(self._run(rewards, groups)[:size])
        except Exception:
            return None

    def _one_of_many(self, rewards: Tensor, groups: Tensor) -> Iterator[Finding]:
        """One right answer among wrong ones: of n numbers none is further than √n standard deviations from the mean,
        with or without itself in it; and no baseline that is made of these rewards lies outside of them."""
        low, high = self._ends()
        one = torch.full_like(rewards, low)
        for g in groups.unique():
            one[(groups == g).nonzero()[0]] = high
        given, right, bound = self._run(one, groups), one == high, 2.0 * len(groups) * max(1.0, high - low)
        found = largest = _largest(given)
        if self.values is None:  # one wrong answer among rewards whose squares are rounded
            largest = max(found, _largest(self._run(torch.where(right, 0.0, ROUNDS), groups)))
        why = "One different answer gets an unbounded advantage: the others' spread, 0 or rounding, divides it."
        subject = "one right answer among wrong ones"
        yield self.finding(subject, f"largest {largest:.3g}", f"≤ {bound:g}", largest <= bound, why)
        if math.isinf(found) or bool(right.all()):  # groups of one
            return
        subject = "the right answer stands above the wrong ones"
        if found == 0:
            why = "One right answer has a zero gradient here: legitimate where such groups are left out by design."
            yield self.not_applicable(subject, "every advantage is 0", why)
            return
        worst, best = float(given[right].min()), float(given[~right].max())
        room = self._rounded(one, groups, given) * found
        measured, holds = f"right {worst:.3g}, wrong up to {best:.3g}", worst >= -room and best <= room and worst > best
        why = "The only right answer is pushed down, or wrong ones up: a sign, an absolute value, or a wrong baseline."
        yield self.finding(subject, measured, f"right ≥ 0 ≥ wrong, up to {room:.1g}, and right > wrong", holds, why)

    def _missing(self, rewards: Tensor, groups: Tensor) -> Finding:
        """A reward that could not be computed (a grader that failed, an answer that was cut) is no reward of 0."""
        subject, expected = "a missing (NaN) reward", "an error, NaN, or a group without that row, or without any"
        if self.values is not None:
            return self.not_applicable(subject, "leads out of the declared values")
        missing = torch.arange(len(groups)) == 0
        reach = (groups == groups[0]) & ~missing if self.over == "group" else ~missing
        try:
            found = self._run(torch.where(missing, torch.nan, rewards), groups)[reach]
        except Exception as error:
            return self.finding(subject, f"raises {type(error).__name__}", expected, True)
        if bool(found.isnan().all()) or bool((found == 0).all()):
            return self.finding(subject, "its group is NaN or left out", expected, True)
        try:
            without = self._run(rewards[1:], groups[1:])[reach[1:]]
        except Exception as error:  # an estimator of groups of one size cannot be checked
            return self.refused(subject, error, "cannot be left out")
        if math.isinf(_largest(without)):  # what is left of the group has no spread
            return self.not_applicable(subject, "the rest of its group has no advantages")
        off = self._off(found, without)
        why = "A missing reward becomes a number, and other answers are compared with it: leave its row out, or raise."
        return self.finding(subject, f"the others are off by {off:.2g}", expected, off <= self._room, why)

    def _run(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """As the estimator gives it, in its own dtype."""
        return torch.as_tensor(self.fn(rewards.clone(), groups.clone())).detach().reshape(-1)

    def _rounded(self, rewards: Tensor, groups: Tensor, given: Tensor) -> float:
        """Rounding of the largest shifted reward, in the dtype of what is ``given`` back, over the smallest spread that
        a group (or the batch) divides by, and the usual constant in that division's denominator."""
        parts = [rewards[groups == g] for g in groups.unique()] if self.over == "group" else [rewards]
        spread = min((float(p.std()) for p in parts if len(p) > 1), default=1.0)
        # 16 bits: a few units in the last place; more would let anything pass.
        unit = rounding(rewards) if given.dtype in (torch.float32, torch.float64) else 2 * torch.finfo(given.dtype).eps
        return (unit * (float(rewards.abs().max()) + SHIFT) + STABILISER) / spread


def _largest(advantages: Tensor) -> float:
    """The largest size; infinite where one is not finite."""
    return float(advantages.abs().max()) if bool(torch.isfinite(advantages).all()) else math.inf
