"""Weights that are merged, pushed to a sampler, averaged between replicas, thinned out or gathered.

Merge       merged = unmerged; merge(-w) = -merge(w)
WeightSync  after a push, probe log-probs follow a deliberate kick, and what was pushed has another hash
OuterStep   one replica, outer SGD at lr 1 lands on the local weights; mixing knobs matter
Unbiased    E[f(x)] = x, for every setting of a random thinning
Gather      what every rank sent is what every rank has
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from earnest.audit.law import Law
from earnest.audit.subjects.base import judged, rounding
from earnest.audit.verdict import Finding

NUDGE = 2.0**-12


@dataclass
class Merge:
    """``delta(w)`` is what merging an adapter with weight w adds to the base; ``applied(w)`` the unmerged effect, if
    at hand."""

    delta: Callable[[float], Tensor]
    applied: Callable[[float], Tensor] | None = None
    tolerance: float | None = None  # none: from the dtype and from how finely the merged weights can be written

    def check(self) -> Iterator[Finding]:
        one, minus = self.delta(1.0), self.delta(-1.0)
        size = max(float(one.abs().max()), 1e-12)
        room = self._room(one, size) if self.tolerance is None else self.tolerance
        yield judged(
            "GL",
            "merge(1)",
            f"changes weights by {size:.2g}",
            "above 0",
            bool((one != 0).any()),
            "Merging adds nothing.",
        )
        off = float((one + minus).abs().max()) / size
        yield judged(
            "LAW",
            "merge(-w) = -merge(w)",
            f"off by {off:.2g}",
            f"≤ {room:.1g}",
            off <= room,
            "Merging with a negative weight is not the opposite: a square root or an absolute value of the weight.",
        )
        half = float((self.delta(0.5) * 2 - one).abs().max()) / size
        yield judged(
            "LAW",
            "merge(½) = ½·merge(1)",
            f"off by {half:.2g}",
            f"≤ {room:.1g}",
            half <= room,
            "The weight does not scale the merged difference linearly.",
        )
        if self.applied is not None:
            apart = float((self.applied(1.0) - one).abs().max()) / size
            yield judged(
                "DF",
                "merged = unmerged",
                f"off by {apart:.2g}",
                f"≤ {room:.1g}",
                apart <= room,
                "The merged model is another one than the adapter beside its layer.",
            )

    def _room(self, one: Tensor, size: float) -> float:
        """A difference of large weights is as fine as those are: what a weight of 1 ± 2⁻¹² (or four units in the last
        place, where they are more) misses by says how fine."""
        nudge = max(NUDGE, 4 * torch.finfo(one.dtype).eps)
        grain = max(float((self.delta(w) - w * one).abs().max()) / size for w in (1 + nudge, 1 - nudge))
        return min(0.5, max(16 * grain, rounding(one)))


@dataclass
class WeightSync:
    """``kick()`` moves the trainer, ``push()`` syncs, ``trainer()`` and ``sampler()`` give log-probs of one fixed
    text."""

    kick: Callable[[], None]
    push: Callable[[], Any]
    trainer: Callable[[], Tensor]
    sampler: Callable[[], Tensor]
    precision: torch.dtype | None = None  # of the coarser of the two programs, where it is coarser than its log-probs
    tolerance: float | None = None  # none: rounding in that precision

    def check(self) -> Iterator[Finding]:
        self.push()
        before = self.sampler().detach().clone()
        room = self.tolerance
        if room is None:
            room = rounding(before, self.trainer(), precision=self.precision)
        agree = _apart(before, self.trainer().detach())
        yield judged(
            "RT",
            "sampler = trainer after a push",
            f"log-probs off by {agree:.2g}",
            f"≤ {room:.1g}",
            agree <= room,
            "Sampler and trainer are different policies.",
        )
        self.kick()
        moved = _apart(self.trainer().detach(), before)
        self.push()
        after = self.sampler().detach()
        left = _apart(after, self.trainer().detach())
        yield judged(
            "RT",
            "the sampler follows a kick",
            f"{left:.2g} behind of {moved:.2g}",
            f"≤ {room:.1g}",
            moved > room and left <= room,
            "The push did not arrive: other tensors were sent, the adapter slot is stale, or a cache answers.",
        )


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference of two log-probs, over the larger of 1 and their size."""
    return float(((a - b).abs() / torch.maximum(a.abs(), b.abs()).clamp_min(1.0)).max())


@dataclass
class OuterStep:
    """``step(start, locals, **knobs)`` -> new global weights of a local-SGD round with outer SGD at learning rate 1."""

    step: Callable[..., Tensor]
    knobs: Mapping[str, float] = field(default_factory=dict)
    size: int = 7

    def check(self) -> Iterator[Finding]:
        rng = torch.Generator().manual_seed(0)
        start, one, two = (torch.randn(self.size, generator=rng) for _ in range(3))
        landed = self.step(start.clone(), [one.clone()], **self.knobs)
        room = rounding(start, landed) * max(float(t.abs().max()) for t in (start, one, two))
        off = float((landed - one).abs().max())
        yield judged(
            "LAW",
            "one replica, outer lr 1",
            f"lands {off:.2g} from the local weights",
            f"0, up to {room:.1g}",
            off <= room,
            "One replica must end on its own weights. It does not: the pseudo-gradient has the wrong sign, or mixing "
            "is off.",
        )
        mean = self.step(start.clone(), [one.clone(), two.clone()], **self.knobs)
        apart = float((mean - (one + two) / 2).abs().max())
        yield judged(
            "LAW",
            "two replicas, outer lr 1",
            f"{apart:.2g} from their mean",
            f"0, up to {room:.1g}",
            apart <= room,
            "Two replicas do not end on their mean: one is left out, or the average is not over members.",
        )
        for knob, value in self.knobs.items():
            other = self.step(start.clone(), [one.clone()], **{**self.knobs, knob: value + 0.3})
            yield judged(
                "KG",
                f"knob {knob}",
                "no change" if torch.equal(other, landed) else "it matters",
                "it matters",
                not torch.equal(other, landed),
                f"{knob} does nothing: its result is discarded (not in place?).",
            )


@dataclass
class Unbiased:
    """``fn(x, setting)`` thins x at random; its mean over many draws is x at every setting."""

    fn: Callable[[Tensor, float], Tensor]
    settings: Sequence[float] = (0.3, 0.7)
    draws: int = 2000

    def check(self) -> Iterator[Finding]:
        x = torch.linspace(-2, 3, 11)
        for setting in self.settings:
            torch.manual_seed(0)
            total = torch.stack([self.fn(x.clone(), setting) for _ in range(self.draws)])
            mean, spread = total.mean(0), total.std(0) / self.draws**0.5
            off = float(((mean - x).abs() / (6 * spread + 1e-6)).max())
            yield judged(
                "LAW",
                f"mean at {setting}",
                f"{off:.2g} × six standard errors from the input",
                "≤ 1",
                off <= 1.0,
                "The mean is not the input: survivors are not rescaled (a result that is discarded?).",
            )


@dataclass
class Gather:
    """``gather(values)`` simulates ranks that send one tensor each and returns what a rank receives."""

    gather: Callable[[list[Tensor]], Sequence[Tensor]]
    ranks: int = 3

    def check(self) -> Iterator[Finding]:
        sent = [torch.full((2,), float(rank + 1)) for rank in range(self.ranks)]
        got = [float(t.flatten()[0]) for t in self.gather([t.clone() for t in sent])]
        wanted = [float(rank + 1) for rank in range(self.ranks)]
        yield judged(
            "RT",
            "ranks",
            f"{got}",
            f"{wanted}",
            got == wanted,
            "A rank does not have what every rank sent: all slots are one tensor, or the order is lost.",
        )


LAWS = (
    Law(
        code="LAW",
        name="merge (Merge)",
        sentence="merge(-w) = -merge(w), merge(½) = ½·merge(1), and merged = unmerged.",
        needs="delta(w); applied(w) for the unmerged effect",
        how="Differences of the merged weights. The tolerance is their dtype's rounding, or 16 times what a weight of "
        "1 ± 2⁻¹² misses by, where a small difference is written into large weights.",
        traps="A difference of bf16 weights is coarse, and says so.",
        caught="a square root or an absolute value of the weight, another scale in the merged path",
        check=Merge.check,
    ),
    Law(
        code="RT",
        name="weight sync (WeightSync)",
        sentence="After a push the sampler says what the trainer says, and follows a deliberate kick.",
        needs="kick, push, trainer, sampler; precision where a program is coarser than its log-probs",
        how="Log-probs of one text on both sides, before and after a kick. The tolerance is 64 units in the last "
        "place of the coarsest dtype (at most ⅛), relative to a log-prob where it is above 1.",
        traps="Two programs in 16 bits differ lawfully: declare precision.",
        caught="other tensors pushed than the trained ones, a stale adapter slot",
        check=WeightSync.check,
    ),
    Law(
        code="LAW",
        name="outer step (OuterStep)",
        sentence="At outer learning rate 1 one replica lands on its own weights and two on their mean; knobs matter.",
        needs="step(start, locals, **knobs)",
        how="Random weights in fp32. The tolerance is rounding of the largest.",
        traps="Outer momentum is 0 here: give it as a knob.",
        caught="a pseudo-gradient with the wrong sign, torchft #233 (alpha)",
        check=OuterStep.check,
    ),
    Law(
        code="LAW",
        name="thinning (Unbiased)",
        sentence="The mean of a random thinning is its input, at every setting.",
        needs="fn(x, setting)",
        how="Many draws; within six standard errors.",
        traps="Six standard errors of 22 numbers: one false alarm in some twenty million audits.",
        caught="PEFT #3152 (DARE's rescaling is computed and thrown away)",
        check=Unbiased.check,
    ),
    Law(
        code="RT",
        name="gather (Gather)",
        sentence="What every rank sent is what every rank has.",
        needs="gather(values)",
        how="Every rank sends its own number.",
        traps="None.",
        caught="all_gather into [t] * world_size",
        check=Gather.check,
    ),
)
