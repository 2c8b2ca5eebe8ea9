"""Ema: averages with a wrong rate, a warm-up, or in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from earnest_audit import (
    Ema,
    OuterStep,
    audit,
)


def failed(subject: Any) -> set[str]:
    return {f.subject for f in audit(subject).failures}


def test_an_average_whose_rate_is_its_decay_is_seen() -> None:
    """TRL #4935."""
    assert audit(Ema(lambda a, c, r: a.lerp_(c, r))).holds
    assert audit(Ema(lambda a, c, r: (1 - r) * a + r * c, dtype=torch.bfloat16)).holds
    assert {"rate 0", "rate 1", "rate 0.0625"} <= failed(Ema(lambda a, c, r: a.lerp_(c, 1 - r)))
    still = {"rate 1", "rate 0.0625", "rate 0.0625, a second time", "many updates at rate 0.001"}
    assert failed(Ema(lambda a, c, r: None)) == still
    assert {"rate 1", "rate 0.0625"} <= failed(Ema(lambda a, c, r: a + r * c)), "weights that do not add to 1"


def test_a_momentum_that_averages_weights_has_no_memory() -> None:
    """start·m + mean·(1 - m): stateless, and right."""
    assert audit(OuterStep(lambda s, e, momentum: torch.stack(e).mean(0).lerp(s, momentum), {"momentum": 0.9})).holds


class Warm:
    """decay = min(1 - rate, warm-up of the t-th update); ``swapped`` takes the rate for the decay."""

    def __init__(self, how: str, swapped: bool = False, in_place: bool = True) -> None:
        self.how, self.swapped, self.in_place, self.t = how, swapped, in_place, 0

    def decay(self, wanted: float) -> float:
        warm = {
            "tensorflow": (1 + self.t) / (10 + self.t),
            "diffusers": 1 - (1 + self.t) ** (-2 / 3),
            "copies first": 0.0 if self.t < 100 else 1.0,
        }[self.how]
        self.t += 1
        return min(wanted, warm)

    def __call__(self, average: Tensor, current: Tensor, rate: float) -> Tensor | None:
        decay = self.decay(rate if self.swapped else 1 - rate)
        if self.in_place:
            average.mul_(decay).add_(current, alpha=1 - decay)
            return None
        return decay * average + (1 - decay) * current


@pytest.mark.parametrize("how", ["tensorflow", "diffusers", "copies first"])
@pytest.mark.parametrize("in_place", [True, False])
def test_an_average_may_warm_up(how: str, in_place: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        verdict = audit(Ema(Warm(how, in_place=in_place), dtype=dtype))
        assert verdict.holds, str(verdict)
        right = Warm(how, in_place=in_place)
        assert audit(Ema(lambda a, c, r, u=right: u(a, c, r), dtype=dtype)).holds, "a count in a closure"
    assert {"rate 0", "rate 0.0625"} <= failed(Ema(Warm(how, swapped=True, in_place=in_place)))


def test_a_rate_that_nobody_reads_is_no_warm_up() -> None:
    class Mean:
        t = 0

        def __call__(self, average: Tensor, current: Tensor, rate: float) -> Tensor:
            self.t += 1
            return average.lerp(current, 1 / self.t)

    assert failed(Ema(Mean()))
    assert {"rate 0", "rate 1"} <= failed(Ema(lambda a, c, r: a.lerp(c, 0.1)))


MOVES = "many updates at rate "


def rounded_at_random(x: Tensor) -> Tensor:
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)) & -65536).view(torch.float32).bfloat16()


@pytest.mark.parametrize("rate", [0.5, 0.1, 0.01, 1e-3, 1e-4])
def test_an_average_in_16_bits_moves_or_is_reported(rate: float) -> None:
    def plain(a: Tensor, c: Tensor, r: float) -> Tensor:
        return (1 - r) * a + r * c

    assert audit(Ema(plain, rate=rate)).holds
    assert audit(Ema(plain, rate=rate, dtype=torch.float64)).holds
    assert audit(Ema(lambda a, c, r: a.lerp_(c, r), rate=rate)).holds
    assert audit(
        Ema(lambda a, c, r: rounded_at_random(plain(a.float(), c.float(), r)), rate=rate, dtype=torch.bfloat16)
    ).holds
    stuck = failed(Ema(lambda a, c, r: a.lerp_(c, r), rate=rate, dtype=torch.bfloat16))
    if rate >= 0.1 or rate <= 1e-3:
        assert stuck == ({f"{MOVES}{rate:g}"} if rate <= 1e-3 else set())


def test_a_rate_that_is_not_declared_must_be_declared_in_16_bits() -> None:
    rows = {f.subject: f.outcome for f in audit(Ema(lambda a, c, r: a.lerp_(c, r), dtype=torch.bfloat16)).findings}
    assert rows["many updates"] == "not declared"
    assert not any(f.outcome == "not declared" for f in audit(Ema(lambda a, c, r: a.lerp_(c, r))).findings)


def test_an_average_leaves_the_current_weights_alone() -> None:
    def both(a: Tensor, c: Tensor, r: float) -> None:
        a.lerp_(c, r)
        c.copy_(a)

    def scaled(a: Tensor, c: Tensor, r: float) -> Tensor:
        return a.mul_(1 - r).add_(c.mul_(r))

    for wrong in (both, scaled):
        assert failed(Ema(wrong)) == {"the current weights afterwards"}


@pytest.mark.parametrize("broken", [False, True])
def test_an_average_that_overwrites_its_own_decay(broken: bool) -> None:
    """diffusers #1864: the decay becomes its own complement at every update."""

    class Average:
        def __init__(self, rate: float) -> None:
            self.decay = 1 - rate

        def step(self, average: Tensor, current: Tensor) -> None:
            rate = 1 - self.decay
            if broken:
                self.decay = rate
            average.sub_(rate * (average - current))

    kept: dict[float, Average] = {}

    def update(average: Tensor, current: Tensor, rate: float) -> None:
        kept.setdefault(rate, Average(rate)).step(average, current)

    assert audit(Ema(update=update)).holds is not broken


class EveryThird(Warm):
    """The average moves at each third call."""

    def __call__(self, average: Tensor, current: Tensor, rate: float) -> Tensor | None:
        self.t += 1
        return average.lerp_(current, rate) if self.t % 3 == 1 else None


def test_an_average_that_moves_at_some_calls_declares_which() -> None:
    assert audit(Ema(EveryThird("tensorflow"), rate=0.2, every=3)).holds
    assert "rate 0.0625, a second time" in failed(Ema(EveryThird("tensorflow"), rate=0.2))


class Every:
    """The average moves at each k-th call, by a rate for that call or for all k; ``wrong``: by twice as much."""

    def __init__(self, k: int, each: bool, wrong: bool = False) -> None:
        self.k, self.each, self.share, self.n = k, each, 2 if wrong else 1, 0

    def __call__(self, average: Tensor, current: Tensor, rate: float) -> Tensor:
        self.n += 1
        moves = rate if self.each else 1 - (1 - rate) ** self.k
        return average.lerp_(current, min(1.0, self.share * moves)) if self.n % self.k == 1 % self.k else average


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("k", [1, 2, 4, 10, 100])
def test_a_rate_counts_moves_or_calls(k: int, each: bool) -> None:
    for rate in (None, 1e-2, 1e-4):
        verdict = audit(Ema(Every(k, each), rate=rate, every=k))
        assert verdict.holds, str(verdict)
    assert "rate 0.0625" in failed(Ema(Every(k, each, wrong=True), every=k))
    if each:
        stuck = Ema(Every(k, each), rate=1e-4, every=k, dtype=torch.bfloat16)
        assert failed(stuck) == {f"{MOVES}0.0001"}
