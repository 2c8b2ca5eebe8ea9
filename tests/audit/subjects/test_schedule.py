"""Schedule: warm-ups, groups and ends of learning-rate schedules."""

from __future__ import annotations

import math
from typing import Any

import pytest

from earnest_audit import Schedule, Setting, audit


def failed(subject: Any) -> set[str]:
    return {f.subject for f in audit(subject).failures}


def warm(total: int, shape: str, cycles: float = 0.5, steps: int = 5) -> list[float]:
    found = []
    for k in range(total):
        x = max(0, k - steps) / max(1, total - steps - 1)
        after = {
            "cosine": 0.5 * (1 + math.cos(2 * math.pi * cycles * x)),
            "linear": 1 - x,
            "stable": min(1.0, 4 * (1 - x)),
            "root": math.sqrt(1 / (1 + 400 * x)),
        }[shape]
        found.append((k + 1) / (steps + 1) if k < steps else after)
    return found


@pytest.mark.parametrize("shape", ["cosine", "linear", "stable", "root"])
@pytest.mark.parametrize("total", [13, 40, 400])
def test_a_schedule_falls_after_its_warm_up(shape: str, total: int) -> None:
    final = warm(total, shape)[-1]
    assert audit(Schedule(lambda t, _: warm(t, shape), 1.0, final, total, warmup=5)).holds


def test_a_schedule_that_rises_again_is_seen() -> None:
    """Cycles of a cosine where half of one is meant."""
    again = Schedule(lambda t, _: warm(t, "cosine", 1.5), 1.0, 0.0, warmup=5)
    assert failed(again) == {"after the warm-up"}
    assert audit(Schedule(lambda t, _: warm(t, "cosine", 1.5), 1.0, 0.0, warmup=5, restarts=True)).holds
    assert audit(Schedule(lambda t, _: warm(t, "cosine", 1.5), 1.0, 0.0)).holds, "nothing is declared of its shape"


def rates(total: int, warm: int, written_over: bool = False) -> list[tuple[float, float]]:
    factor = [min(1.0, (k + 1) / max(1, warm)) * (total - k) / total for k in range(total)]
    return [(f, f if written_over else 0.1 * f) for f in factor]


def test_a_declared_warm_up_has_to_happen() -> None:
    def schedule(warm: int, declared: int) -> Schedule:
        return Schedule(lambda t, _: [r for r, _ in rates(t, warm)], 1.0, 0.0, warmup=declared)

    assert audit(schedule(4, 4)).holds
    assert failed(schedule(0, 4)) == {"warm-up"}
    assert failed(schedule(1, 4)) == {"warm-up"}


def test_every_group_has_its_own_rate() -> None:
    """hi-ml #611: one rate is written over every group."""
    assert audit(Schedule(lambda t, _: rates(t, 4), (1.0, 0.1), 0.0)).holds
    assert "peak (group 1)" in failed(Schedule(lambda t, _: rates(t, 4, True), (1.0, 0.1), 0.0))


def test_a_peak_is_not_exceeded() -> None:
    """DeepSpec #32: where the warm-up hands over to the cosine, the rate is 2.5 % above the declared peak."""
    assert failed(Schedule(lambda t, _: [1.025 * rate for rate in warm(t, "linear")], 1.0, 0.0)) == {"peak"}
    assert audit(Schedule(lambda t, _: [0.95 * rate for rate in warm(t, "linear")], 1.0, 0.0)).holds


def test_every_group_may_have_its_own_warm_up() -> None:
    def rates(total: int, ranks: int) -> list[list[float]]:
        return [[min(1.0, (k + 1) / 4), 0.5 * min(1.0, max(0, k - 4) / 4)] for k in range(total)]

    def of(*warmup: int) -> list[str]:
        return [f.subject for f in audit(Schedule(rates, peak=(1.0, 0.5), final=(1.0, 0.5), warmup=warmup)).failures]

    assert of(4, 9) == []
    assert of(9, 9) == ["warm-up (group 0)"]
    with pytest.raises(ValueError, match="3 numbers for 2 groups"):
        of(4, 9, 9)


def test_a_short_decay_ends_a_step_above_its_end() -> None:
    assert audit(Schedule(lambda t, _: [1 - k / t for k in range(t)], 1.0, 0.0, total=7)).holds
    assert "end" in failed(Schedule(lambda t, _: [1 - k / (4 * t) for k in range(t)], 1.0, 0.0, total=7))


def test_the_end_is_judged_against_the_declared_floor() -> None:
    """A decay to 0 where a tenth of the peak is declared as the floor: within a tenth of the peak, and wrong."""
    assert audit(Schedule(lambda t, _: [0.1 + 0.9 * r for r in warm(t, "cosine")], 1.0, 0.1)).holds
    assert failed(Schedule(lambda t, _: warm(t, "cosine"), 1.0, 0.1)) == {"end"}


def test_every_setting_of_a_schedule_matters() -> None:
    def rates(total: int, _: int, power: float, floor: float, obeyed: bool = True) -> list[float]:
        return [floor + (1 - floor) * (1 - k / (total - 1)) ** (power if obeyed else 2.0) for k in range(total)]

    settings = {"power": 2.0, "floor": 0.1}
    assert audit(Schedule(rates, 1.0, 0.1, settings=settings)).holds
    ignored = Schedule(lambda t, r, **s: rates(t, r, obeyed=False, **s), 1.0, 0.1, settings=settings)
    assert failed(ignored) == {"setting power"}


def test_a_schedule_does_not_fall_below_its_floor() -> None:
    def rates(total: int, floored: bool) -> list[float]:
        found = [math.cos(0.5 * math.pi * k / (total - 6)) if k < total - 5 else 0.1 for k in range(total)]
        return [max(0.1, r) if floored else r for r in found]

    assert "floor" not in failed(Schedule(lambda t, _: rates(t, True), 1.0, 0.1))
    assert failed(Schedule(lambda t, _: rates(t, False), 1.0, 0.1)) == {"floor"}


def notches(total: int) -> list[float]:
    """A warm-up of 5 steps, and three falls to 0 in a linear decay to a tenth."""
    found = [min(1.0, (k + 1) / 5) * (1 - 0.9 * max(0, k - 4) / (total - 5)) for k in range(total)]
    return [0.0 if k in (15, 25, 35) else rate for k, rate in enumerate(found)]


def test_restarts_may_fall_below_the_end_and_rise_above_the_first_top() -> None:
    assert audit(Schedule(lambda t, _: notches(t), 1.0, 0.1, warmup=5, restarts=True)).holds
    grows = [rate * (3 if k > 20 else 1) for k, rate in enumerate(warm(40, "linear"))]
    assert audit(Schedule(lambda t, _: grows, grows[21], 0.0, warmup=5, restarts=True)).holds
    late = Schedule(lambda t, _: notches(t), 1.0, 0.1, warmup=20, restarts=True)
    assert failed(late) == {"warm-up"}
    below = Schedule(lambda t, _: [*notches(t)[:-3], 0.0, 0.1, 0.1], 1.0, 0.1, warmup=5)
    assert "floor" in failed(below)


def test_a_schedule_that_is_over_before_the_run_is_seen() -> None:
    """AReaL #1289: the decay lacks the warm-up a second time."""
    early = [*warm(35, "cosine"), *[0.0] * 5]
    assert failed(Schedule(lambda t, _: early, 1.0, 0.0, warmup=5)) == {"the last steps"}

    def held(total: int, _: int) -> list[float]:
        return [max(0.1, r) for r in early[:total]]

    assert audit(Schedule(held, 1.0, 0.1, warmup=5)).holds, "a floor may be held"
    reached = held(40, 1).index(0.1)
    assert audit(Schedule(held, 1.0, 0.1, warmup=5, ends=reached)).holds, "and the step that reaches it declared"
    for ends in (40, reached - 6):
        assert failed(Schedule(held, 1.0, 0.1, warmup=5, ends=ends)) == {"the last steps"}


@pytest.mark.parametrize("length", [30, 20])
def test_a_cosine_that_is_held_just_above_its_end(length: int) -> None:
    """DINO's table has one entry per step, at i / n: the last one is just above the end, and is held after it."""

    def rates(total: int, _: int) -> list[float]:
        return [0.5 + 0.5 * math.cos(math.pi * min(k, length - 1) / length) for k in range(total)]

    assert failed(Schedule(rates, 1.0, 0.0, ends=30)) == (set() if length == 30 else {"the last steps"})


def test_every_rank_has_the_same_rate() -> None:
    """nanochat #857: each rank counts its own progress."""

    def plan(t: int, _: int) -> list[float]:
        return warm(t, "linear")

    assert audit(Schedule(plan, 1.0, 0.0, warmup=5, of_rank=lambda t, rank: plan(t, 1))).holds
    local = Schedule(plan, 1.0, 0.0, warmup=5, of_rank=lambda t, rank: [r * (1 - 0.01 * rank) for r in plan(t, 1)])
    assert failed(local) == {"every rank"}


@pytest.mark.parametrize(("final", "floor"), [(0.0, 0.0), (0.0, 0.09), (0.1, 0.1), (0.1, 0.12)])
@pytest.mark.parametrize("linear", [False, True])
def test_another_floor_than_the_declared_one_is_seen_where_the_end_is_declared(
    final: float, floor: float, linear: bool
) -> None:
    def rates(total: int, ranks: int) -> list[float]:
        part = [min(1.0, max(0.0, (k - 5) / 74)) for k in range(total)]
        share = [1 - t if linear else 0.5 * (1 + math.cos(math.pi * t)) for t in part]
        return [(k + 1) / 5 if k < 5 else floor + (1 - floor) * s for k, s in enumerate(share)]

    assert failed(Schedule(rates, 1.0, final, total=100, warmup=5, ends=80)) == (
        {"the last steps"} if floor > final else set()
    )


def test_a_floor_without_its_step_asks_for_it() -> None:
    """A decay that is over long before the run is, with a floor: only ``ends`` tells whether that is right."""
    rows = {
        f.subject: f.outcome
        for f in audit(Schedule(lambda n, _: [max(0.1, 1 - k / 60) for k in range(n)], 1.0, 0.1)).findings
    }
    assert rows["the last steps"] == "not declared"


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ValueError, match="it is longer than a run of 100 steps: give total="):
        audit(Schedule(lambda n, _: [1.0] * n, 1.0, 1.0, total=100, warmup=200))


def test_a_setting_of_a_schedule_is_a_plain_number() -> None:
    settings: Any = {"power": Setting(2.0)}
    with pytest.raises(ValueError, match=r"settings={'power': .*Mapping\[str, float\] is needed"):
        audit(Schedule(lambda n, _, power: [power] * n, 1.0, 1.0, settings=settings))


@pytest.mark.parametrize("length", [10, 15, 20])
@pytest.mark.parametrize("total", [40, 400])
def test_a_decay_that_is_not_shifted_by_the_warm_up_is_doubted(total: int, length: int) -> None:
    """fairchem #1967: the rate jumps down after the warm-up. Steep decays do so less."""
    n = length * total // 40

    def warned(after: Any) -> set[str]:
        def rates(total: int, _: int) -> list[float]:
            return [min(1.0, (k + 1) / n) if k < n else after(k, total) for k in range(total)]

        verdict = audit(Schedule(rates, 1.0, rates(total, 1)[-1], total, warmup=n))
        assert not verdict.failures, str(verdict)
        return {f.subject for f in verdict.warnings}

    assert warned(lambda k, t: 0.5 + 0.5 * math.cos(math.pi * k / t)) == {"the first fall"}
    for right in (
        lambda k, t: 0.5 + 0.5 * math.cos(math.pi * (k - n) / (t - n)),
        lambda k, t: math.sqrt(n / (k + 1)),
        lambda k, t: n / (k + 1),
        lambda k, t: 1 - math.sqrt((k + 1 - n) / (t - n)),
        lambda k, t: 0.5 ** ((k + 1 - n) * 10 / t),
        lambda k, t: 1.0 if k < 0.8 * t else 0.3,
    ):
        assert not warned(right) - {"half way"}
