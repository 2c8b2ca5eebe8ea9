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

from earnest.audit.subjects.base import judged
from earnest.audit.verdict import Finding


@dataclass
class Merge:
    """``delta(w)`` is what merging an adapter with weight w adds to the base; ``applied(w)`` the unmerged effect, if
    at hand."""

    delta: Callable[[float], Tensor]
    applied: Callable[[float], Tensor] | None = None
    tolerance: float = 1e-4

    def check(self) -> Iterator[Finding]:
        one, minus = self.delta(1.0), self.delta(-1.0)
        size = max(float(one.abs().max()), 1e-12)
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
            f"≤ {self.tolerance:g}",
            off <= self.tolerance,
            "Merging with a negative weight is not the opposite: a square root or an absolute value of the weight.",
        )
        half = float((self.delta(0.5) * 2 - one).abs().max()) / size
        yield judged(
            "LAW",
            "merge(½) = ½·merge(1)",
            f"off by {half:.2g}",
            f"≤ {self.tolerance:g}",
            half <= self.tolerance,
            "The weight does not scale the merged difference linearly.",
        )
        if self.applied is not None:
            apart = float((self.applied(1.0) - one).abs().max()) / size
            yield judged(
                "DF",
                "merged = unmerged",
                f"off by {apart:.2g}",
                f"≤ {self.tolerance:g}",
                apart <= self.tolerance,
                "The merged model is another one than the adapter beside its layer.",
            )


@dataclass
class WeightSync:
    """``kick()`` moves the trainer, ``push()`` syncs, ``trainer()`` and ``sampler()`` give log-probs of one fixed
    text."""

    kick: Callable[[], None]
    push: Callable[[], Any]
    trainer: Callable[[], Tensor]
    sampler: Callable[[], Tensor]
    tolerance: float = 1e-3

    def check(self) -> Iterator[Finding]:
        self.push()
        before = self.sampler().detach().clone()
        agree = float((before - self.trainer().detach()).abs().max())
        yield judged(
            "RT",
            "sampler = trainer after a push",
            f"log-probs off by {agree:.2g}",
            f"≤ {self.tolerance:g}",
            agree <= self.tolerance,
            "Sampler and trainer are different policies.",
        )
        self.kick()
        moved = float((self.trainer().detach() - before).abs().max())
        self.push()
        after = self.sampler().detach()
        left = float((after - self.trainer().detach()).abs().max())
        yield judged(
            "RT",
            "the sampler follows a kick",
            f"{left:.2g} behind of {moved:.2g}",
            f"≤ {self.tolerance:g}",
            moved > self.tolerance and left <= self.tolerance,
            "The push did not arrive: other tensors were sent, the adapter slot is stale, or a cache answers.",
        )


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
        off = float((landed - one).abs().max())
        yield judged(
            "LAW",
            "one replica, outer lr 1",
            f"lands {off:.2g} from the local weights",
            "0",
            off <= 1e-5,
            "One replica must end on its own weights. It does not: the pseudo-gradient has the wrong sign, or mixing "
            "is off.",
        )
        mean = self.step(start.clone(), [one.clone(), two.clone()], **self.knobs)
        apart = float((mean - (one + two) / 2).abs().max())
        yield judged(
            "LAW",
            "two replicas, outer lr 1",
            f"{apart:.2g} from their mean",
            "0",
            apart <= 1e-5,
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
