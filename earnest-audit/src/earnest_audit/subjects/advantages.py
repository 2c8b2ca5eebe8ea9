"""ADV: A constant on a group's rewards changes nothing, groups are independent, a group sums to 0, scaling has the
declared effect, order and names do not matter, equal rewards give 0, the only right answer is not below 0 and above the
wrong ones, a missing reward does not become a number, inputs are not modified.

shift     + a constant on all rewards of one group changes nothing (but a common factor, where it divides by the batch)
locality  a change in one group leaves the others alone (likewise)
zero sum  Σ over a group is 0, where the division is by one number per group
scale     rewards × 2: the same (scale="free", divided by a std) or × 2 (scale="equal")
order     permuting the rows permutes the advantages
equal     rewards that are all the same give 0, also where their mean is rounded; one among zeros gives no giant
sign      one right answer in a group is not below 0, the wrong ones not above, and it is above them
names     other names of the groups (100, 101, …) change nothing
inputs    are not written into
missing   a NaN reward raises, stays NaN, or is left out, alone or with its group: it does not become a number

Needs: fn(rewards, groups), scale, over; scaled_over where the division is over something else, baseline where it is not
the mean
How: Rewards are shifted, scaled, permuted, made equal, one is made the only right one, and one NaN; groups get other
names. The tolerance is rounding over the smallest spread, plus the usual constant (up to 1e-4) in a denominator.
Exceptions: Centring over the batch is legitimate where it is declared, and so is a division by the batch's spread
(scaled_over="batch"); an estimator that takes rows by position declares interleaved=False. Rewards that never round (0
and 1) need no floor under the spread: values=(0.0, 1.0); then no others are drawn.
Detects: one sample per prompt (all advantages 0), statistics along the wrong axis, groups by position, NeMo-RL #1518
(spread of the others), NeMo-RL #4158 (equal rewards become ±1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from earnest_audit.law import Law
from earnest_audit.precision import rounding
from earnest_audit.subjects.base import untouched
from earnest_audit.verdict import Finding

SHIFT = 5.0
STABILISER = 1e-4  # the largest constant that public code adds to a standard deviation
NAMES = 100  # what groups are called from, where their names are changed
NOISE = 0.1  # of the usual advantages: what rounding may become in a group without a signal
EXACT = (0.0, 1.0)  # values that no mean rounds
EQUAL = ((7, 0.7), (8, 0.7), (6, 0.1), (5, 1.0))  # seven times 0.7, added up and divided by seven, is not 0.7 in fp32


@dataclass(frozen=True, eq=False)
class Draw:
    """Rewards, groups and their advantages; ``scale`` is what differences are relative to, ``room`` how large they may
    be."""

    rewards: Tensor
    groups: Tensor
    base: Tensor
    scale: float
    room: float

    def same(self, subject: str, a: Tensor, b: Tensor, meaning: str) -> Finding:
        return LAW.agrees(subject, float((a - b).abs().max()) / max(self.scale, 1e-12), self.room, meaning)


@dataclass
class AdvantageEstimator:
    """``over`` is what it is centred over: "group", "batch", or "none" (then shift and sum do not apply).
    ``scaled_over`` is what it is divided by, where that is another: "batch" (one number for all groups) or "row" (each
    row's own, such as the spread of the others), or "mean" (a group's mean, of rewards above 0: a shift then changes
    the size). ``baseline``: "other" where it is not the mean (a median): the sum is then not checked. ``values``: the
    only rewards that occur, such as (0.0, 1.0): no other is drawn, so a shift or a factor that leads out of them is not
    tried. ``interleaved=False``: a group's rows stand together, ``size`` each. ``in_place=True``: it writes into the
    rewards by design.
    """

    fn: Callable[[Tensor, Tensor], Tensor]
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

    def check(self) -> Iterator[Finding]:
        rng = torch.Generator().manual_seed(self.seed)
        groups = torch.arange(self.groups).repeat_interleave(self.size)
        if self.interleaved:  # rows of a group need not stand together, unless the estimator assumes it
            groups = groups[torch.randperm(len(groups), generator=rng)]
        rewards = self._draw(groups, rng)
        why = "The estimator writes into its inputs: what is logged or used afterwards are not the rewards any more."
        given, unchanged = untouched(LAW, self.fn, {"rewards": rewards, "groups": groups}, why)
        given = torch.as_tensor(given).detach().reshape(-1).clone()
        base = given.float()
        draw = Draw(rewards, groups, base, float(base.abs().max()), _room(rewards, groups, given, self.over))
        largest = f"largest {draw.scale:.3g}"
        yield LAW.finding(
            "advantages", largest, "not all 0", draw.scale > 0, "Every advantage is 0: nothing is learned."
        )
        if not self.in_place:
            yield unchanged
        if self.over == "group":
            yield from self._alone()
            yield from self._grouped(draw)
        for subject, wanted, edit, meaning in self._relations(draw, rng):
            if self.values is not None and subject != "permuted rows":
                yield LAW.not_applicable(subject, "leads out of the declared values")
            else:
                yield draw.same(subject, wanted, self._run(*edit), meaning)
        if self.over != "none":
            yield self._equal(draw.scale)
            yield from self._one_of_many(rewards, groups)
        yield self._missing(draw)

    def _relations(self, draw: Draw, rng: torch.Generator) -> Iterator[tuple[str, Tensor, tuple[Tensor, Tensor], str]]:
        """Subject, the advantages that are expected, the edited rewards and groups, what a failure means."""
        rewards, groups, base = draw.rewards, draw.groups, draw.base
        if self.over == "batch":
            why = "A constant on all rewards moves the advantages: they are not centred."
            yield "shift of all rewards", base, (rewards + SHIFT, groups), why
        why = (
            "Scaling the rewards does not have the declared effect: the division by the standard deviation is in the "
            "wrong mode."
        )
        yield f"scale ({self.scale})", base if self.scale == "free" else base * 2, (rewards * 2, groups), why
        order = self._order(rng)
        why = "The order of the rows matters: a statistic is broadcast along the wrong axis, or groups are found by "
        yield "permuted rows", base[order], (rewards[order], groups[order]), f"{why}place."

    def _alone(self) -> Iterator[Finding]:
        try:
            rewards = [0.3, 1.7] if self.values is None else list(self._ends())
            found = self._run(torch.tensor(rewards), torch.tensor([0, 1]))
        except Exception:  # it refuses them, with an error that its user sees
            return
        if bool((found == 0).all()):
            why = "One sample per prompt has a zero gradient here."
            yield LAW.not_applicable("groups of one row", "advantages are 0", why)

    def _grouped(self, draw: Draw) -> Iterator[Finding]:
        rewards, groups, base, room = draw.rewards, draw.groups, draw.base, draw.room
        first = groups == groups[0]
        if self.values is not None:
            yield LAW.not_applicable("shift of one group", "leads out of the declared values")
        else:
            shifted = self._run(rewards + SHIFT * first.float(), groups)
            yield draw.same(
                "shift of one group", base, self._alike(shifted, base, first),
                "A constant on one prompt's rewards moves advantages: they are normalised across prompts (declare "
                'over="batch", or scaled_over="batch" or "mean", where that is intended), or the groups are cut '
                "wrongly (tiled against interleaved).",
            )  # fmt: skip
        yield self._refusable(
            "other names of the groups", (rewards, groups + NAMES), draw, lambda found: (base, found),
            f"The same groups are called {NAMES}, {NAMES + 1}, … instead of 0, 1, …, and advantages change without an "
            "error: a name is taken for a place or a number. Raise, or count the names that are there.",
        )  # fmt: skip
        other = self._run(torch.where(first, self._others(rewards, first), rewards), groups)
        if bool(first.all()):
            yield LAW.not_applicable("group locality", "one group", "Declare groups=2 or more.")
        else:
            yield draw.same(
                "group locality", base[~first], self._alike(other[~first], base[~first], first[~first]),
                "Another prompt's rewards reach into this one's advantages. (Where one spread divides all of them by "
                'design, declare scaled_over="batch".)',
            )  # fmt: skip
            rest = groups[:-1] != groups[-1]
            mine, unchanged = base[:-1][rest], torch.zeros_like(rest[rest])
            yield self._refusable(
                "groups of unequal size", (rewards[:-1], groups[:-1]), draw,
                lambda found: (mine, self._alike(found[rest], mine, unchanged)),
                "A row is missing in one group (filtered, for example), and other groups' advantages change: groups "
                "are cut by place, and rows of two prompts are compared. Raise where groups are not full.",
            )  # fmt: skip
        if self.scaled_over == "row":  # each row is divided by its own number: the signs are what is left of a sum
            means = torch.stack([rewards[groups == g].mean() for g in groups])
            clear = (rewards - means).abs() > room * rewards.abs().max()  # not a reward that is its group's mean
            wrong = int((torch.sign(base) != torch.sign(rewards - means))[clear].sum())
            why = "A row's advantage has another sign than its reward against its group's mean."
            measured = f"{wrong} of {len(base)} rows are not"
            yield LAW.finding("above the group's mean is positive", measured, "none", wrong == 0, why)
        elif self.baseline == "other":
            yield LAW.not_applicable("sum over a group", "the baseline is not the mean")
        else:
            sums = max(abs(float(base[groups == g].sum())) for g in range(self.groups))
            near = room * draw.scale * self.size
            yield LAW.finding(
                "sum over a group", f"{sums:.2g}", f"0, up to {near:.1g}", sums <= near,
                "Advantages of a group do not cancel: the baseline is not the group's mean. (Where another one is "
                'intended, such as a median, declare baseline="other".)',
            )  # fmt: skip

    def _refusable(
        self, subject: str, edit: tuple[Tensor, Tensor], draw: Draw,
        pair: Callable[[Tensor], tuple[Tensor, Tensor]], meaning: str,
    ) -> Finding:  # fmt: skip
        """A change that an estimator may refuse (other names, other sizes); it must not change advantages."""
        try:
            found = self._run(*edit)
        except Exception as error:
            return LAW.not_applicable(subject, f"raises {type(error).__name__}")
        return draw.same(subject, *pair(found), meaning)

    def _draw(self, groups: Tensor, rng: torch.Generator) -> Tensor:
        """Of the declared values, or normal. A group of declared ones keeps a spread when it loses any row, if its size
        allows: the smallest and the largest value twice each."""
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
            raise ValueError(f"values={self.values}: give two different rewards or more, or leave values out.")
        return values[0], values[-1]

    def _order(self, rng: torch.Generator) -> Tensor:
        """Any; where rows stand by place, whole groups change places, and rows within them."""
        if self.interleaved:
            return torch.randperm(self.groups * self.size, generator=rng)
        rows = [torch.randperm(self.size, generator=rng) for _ in range(self.groups)]
        return torch.cat([rows[g] + g * self.size for g in torch.randperm(self.groups, generator=rng).tolist()])

    def _others(self, rewards: Tensor, first: Tensor) -> Tensor:
        """Other rewards for one group; of declared values, one right answer becomes wrong, or the other way round."""
        if self.values is None:
            return rewards * 3 - 1
        (low, high), changed = self._ends(), rewards.clone()
        rights = (first & (rewards == high)).nonzero().flatten()
        if len(rights) > 1:
            changed[rights[0]] = low
        else:
            changed[(first & (rewards == low)).nonzero().flatten()[:1]] = high
        return changed

    def _alike(self, found: Tensor, base: Tensor, changed: Tensor) -> Tensor:
        """Where one number divides the whole batch, another batch may have another one: a factor above 0 is allowed.
        Where a group's mean divides it, so it is for the rows of the group that was ``changed``."""
        if self.scaled_over not in ("batch", "mean"):
            return found
        free = torch.ones_like(changed) if self.scaled_over == "batch" else changed
        mine, theirs = base[free], found[free]
        factor = float(mine.dot(theirs)) / max(float(theirs.dot(theirs)), 1e-30)
        return torch.where(free & (factor > 0), found * factor, found)

    def _equal(self, scale: float) -> Finding:
        """Equal rewards, in group sizes and values whose mean is rounded: there rounding is divided by rounding."""
        worst, where, tried, rounded = 0.0, "", False, 0.0
        sizes = [(self.size, 0.7), *EQUAL]
        values = EXACT if self.values is None else tuple(map(float, self.values))
        cases = [(n, v) for n, _ in sizes for v in values] + (sizes if self.values is None else [])
        for size, value in cases:
            rewards, groups = torch.full((size,), value), torch.zeros(size, dtype=torch.long)
            if self.over == "group" and self.scaled_over == "batch":  # so that the batch has a spread
                other = value + 1 if self.values is None else next(v for v in self._ends() if v != value)
                spread = torch.where(torch.arange(size) % 2 == 0, value, other)
                rewards, groups = torch.cat([rewards, spread]), torch.arange(2 * size) // size
            try:
                found = self._run(rewards, groups)[:size]
            except Exception:  # an estimator of groups of one size
                continue
            tried = True
            largest = float(found.abs().max()) if bool(torch.isfinite(found).all()) else float("inf")
            if self.values is None and value not in EXACT and largest < float("inf"):
                rounded = max(rounded, largest)
            elif largest > worst:
                worst, where = largest, f" for {size} rewards of {value:g}"
        subject, room = "equal rewards", NOISE * scale
        if not tried:
            return LAW.not_applicable(subject, "one group alone is refused")
        if worst <= room < rounded:  # right for rewards of 0 and 1, which is what most graders give
            return LAW.finding(
                subject, f"0 for 0 and 1, but up to {rounded:.2g} for values that round (0.7)", "0", "not declared",
                "Where rewards are such numbers, a group without a signal is trained on its rounding: add 1e-6 or more "
                "to the spread. Declare values=(…) with those that occur, and they are checked.",
            )  # fmt: skip
        return LAW.finding(
            subject, f"largest {worst:.2g}{where}", f"0, up to {room:.1g}", worst <= room,
            "All answers are worth the same, and advantages are as large as real ones (or not finite): the rounding of "
            "a mean is divided by the rounding of a spread. Add 1e-6 or more to the spread, or set such groups to 0.",
        )  # fmt: skip

    def _one_of_many(self, rewards: Tensor, groups: Tensor) -> Iterator[Finding]:
        """One right answer among wrong ones: of n numbers none is further than √n standard deviations from the mean,
        with or without itself in it; and no baseline that is made of these rewards lies outside of them."""
        low, high = self._ends()
        one = torch.full_like(rewards, low)
        for g in groups.unique():
            one[(groups == g).nonzero()[0]] = high
        given, bound = self._run(one, groups), 2.0 * len(groups) * max(1.0, high - low)
        finite = bool(torch.isfinite(given).all())
        found = float(given.abs().max()) if finite else float("inf")
        why = "One right answer gets an unbounded advantage: it is divided by the others' spread, which is 0."
        yield LAW.finding(
            "one right answer among wrong ones", f"largest {found:.3g}", f"≤ {bound:g}", found <= bound, why
        )
        right = one == high
        if not finite or bool(right.all()):  # groups of one
            return
        subject = "the right answer stands above the wrong ones"
        if found == 0:
            why = "One right answer has a zero gradient here: legitimate where such groups are left out by design."
            yield LAW.not_applicable(subject, "every advantage is 0", why)
            return
        worst, best = float(given[right].min()), float(given[~right].max())
        room = _room(one, groups, self._raw(one, groups), self.over) * found
        yield LAW.finding(
            subject, f"right {worst:.3g}, wrong up to {best:.3g}",
            f"right ≥ 0 ≥ wrong, up to {room:.1g}, and right > wrong",
            worst >= -room and best <= room and worst > best,
            "The only right answer of a group is pushed down, or wrong ones are pushed up: a sign, an absolute value, "
            "or a baseline that lies outside of the rewards.",
        )  # fmt: skip

    def _missing(self, draw: Draw) -> Finding:
        """A reward that could not be computed (a grader that failed, an answer that was cut) is no reward of 0."""
        subject, expected = "a missing (NaN) reward", "an error, NaN, or a group without that row, or without any"
        if self.values is not None:
            return LAW.not_applicable(subject, "leads out of the declared values")
        rewards, groups = draw.rewards, draw.groups
        broken = rewards.clone()
        broken[0] = torch.nan
        try:
            found = self._run(broken, groups)
        except Exception as error:
            return LAW.finding(subject, f"raises {type(error).__name__}", expected, True)
        reach = groups == groups[0] if self.over == "group" else torch.ones_like(groups, dtype=torch.bool)
        reach[0] = False
        rest = torch.arange(len(groups)) != 0
        if bool(found[reach].isnan().all()) or bool((found[reach] == 0).all()):
            what = "NaN" if bool(found[reach].isnan().any()) else "left out"
            return LAW.finding(subject, f"its group is {what}", expected, True)
        try:
            without = self._run(rewards[rest], groups[rest])
        except Exception as error:  # an estimator of groups of one size cannot be checked
            return LAW.not_applicable(subject, f"cannot be left out ({type(error).__name__})")
        if not bool(torch.isfinite(without[reach[1:]]).all()):  # what is left of the group has no spread
            return LAW.not_applicable(subject, "the rest of its group has no advantages")
        off = float((found[1:] - without)[reach[1:]].abs().max()) / max(draw.scale, 1e-12)
        return LAW.finding(
            subject, f"the others are off by {off:.2g}", expected, off <= draw.room,
            "A missing reward becomes a number without an error, and the other answers are compared with it: leave the "
            "row out of its group's statistics, or raise.",
        )  # fmt: skip

    def _run(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return self._raw(rewards, groups).float()

    def _raw(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """As the estimator gives it, in its own dtype."""
        return torch.as_tensor(self.fn(rewards.clone(), groups.clone())).detach().reshape(-1)


def _room(rewards: Tensor, groups: Tensor, given: Tensor, over: str) -> float:
    """Rounding of the largest shifted reward, in the dtype of what is ``given`` back, over the smallest spread that a
    group (or the batch) divides by, and the usual constant in that division's denominator."""
    parts = [rewards[groups == g] for g in groups.unique()] if over == "group" else [rewards]
    spread = min((float(p.std()) for p in parts if len(p) > 1), default=1.0)
    # 16 bits: a few units in the last place; more would let anything pass.
    unit = rounding(rewards) if given.dtype in (torch.float32, torch.float64) else 2 * torch.finfo(given.dtype).eps
    return (unit * (float(rewards.abs().max()) + SHIFT) + STABILISER) / spread


LAW = Law("ADV", "advantages (AdvantageEstimator)", __doc__, AdvantageEstimator.check)
