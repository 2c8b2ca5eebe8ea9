"""Schedules: numbers worked by hand, transformers' schedules, the audit's laws, and the engine that follows them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import optimization

import earnest as en
from earnest.engines.schedules import AnySchedule, RateSchedule
from earnest.errors import ConfigError
from earnest.proving import prove
from earnest.settings import settings
from earnest.signals import Batch
from earnest_audit.subjects.schedule import Schedule as Subject

ALL: list[AnySchedule] = [
    kind(**given)
    for kind in (en.Constant, en.Linear, en.Cosine, en.WSD)
    for given in ({}, {"warmup": 0.1}, {"warmup": 5})
]


def rates(schedule: RateSchedule, total: int) -> list[float]:
    return [schedule.share(t, total) for t in range(1, total + 1)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (en.Constant(), [1, 1, 1, 1, 1]),
        (en.Constant(warmup=4), [1 / 4, 1 / 2, 3 / 4, 1, 1]),
        (en.Linear(floor=0.2), [1, 0.8, 0.6, 0.4, 0.2]),
        (en.Linear(warmup=2, floor=0.1), [0.5, 1, 0.7, 0.4, 0.1]),
        (en.Linear(warmup=0.4, floor=0.1), [0.5, 1, 0.7, 0.4, 0.1]),
        (en.Cosine(floor=0.0), [1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0]),
        (en.Cosine(warmup=1, floor=0.5), [1, (6 + math.sqrt(2)) / 8, 0.75, (6 - math.sqrt(2)) / 8, 0.5]),
        (en.WSD(warmup=2, decay=0.4, floor=0.2), [0.5, 1, 1, 0.6, 0.2]),
        (en.WSD(warmup=0.2, decay=0.6, floor=0.1), [1, 1, 0.7, 0.4, 0.1]),
        (en.WSD(decay=1.0, floor=0.2), [1, 0.8, 0.6, 0.4, 0.2]),
    ],
)
def test_rates_worked_by_hand(schedule: RateSchedule, expected: list[float]) -> None:
    assert rates(schedule, 5) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(("share", "total", "updates"), [(0.07, 100, 7), (0.03, 100, 3), (0.5, 3, 2), (0.9, 2, 1)])
def test_a_share_of_warm_up_is_rounded_up_and_leaves_an_update(share: float, total: int, updates: int) -> None:
    assert en.Cosine(warmup=share).warmup_updates(total) == updates


def theirs(make: Callable[..., Any], total: int, **given: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer, **given)
    return [scheduler.lr_lambdas[0](t) for t in range(1, total + 1)]


@pytest.mark.parametrize("warmup", [1, 4])
@pytest.mark.parametrize("total", [9, 40])
def test_the_same_rates_as_transformers(warmup: int, total: int) -> None:
    """Theirs count from 0, so that their first update has rate 0; number t of ours is number t + 1 of theirs."""
    known = {"num_warmup_steps": warmup, "num_training_steps": total}
    pairs = [
        (
            en.Constant(warmup=warmup),
            theirs(optimization.get_constant_schedule_with_warmup, total, num_warmup_steps=warmup),
        ),
        (en.Linear(warmup=warmup, floor=0.0), theirs(optimization.get_linear_schedule_with_warmup, total, **known)),
        (en.Cosine(warmup=warmup, floor=0.0), theirs(optimization.get_cosine_schedule_with_warmup, total, **known)),
        (
            en.Cosine(warmup=warmup, floor=0.25),
            theirs(optimization.get_cosine_with_min_lr_schedule_with_warmup, total, **known, min_lr_rate=0.25),
        ),
        (
            en.WSD(warmup=warmup, floor=0.0, decay=3 / total),
            theirs(optimization.get_wsd_schedule, total, **known, num_decay_steps=3, decay_type="linear"),
        ),
    ]
    for schedule, expected in pairs:
        assert rates(schedule, total) == pytest.approx(expected, abs=1e-12), schedule


@pytest.mark.parametrize("schedule", ALL, ids=repr)
@pytest.mark.parametrize("total", [8, 40, 333])
def test_the_laws_of_the_audit_hold(schedule: AnySchedule, total: int) -> None:
    floor = getattr(schedule, "floor", 1.0)
    subject = Subject(
        rates=lambda updates, ranks: [2e-3 * share for share in rates(schedule, updates)],
        peak=2e-3,
        final=2e-3 * floor,
        total=total,
        warmup=schedule.warmup_updates(total),
        ends=total,
    )
    findings = list(subject.check())
    assert not [f for f in findings if f.outcome != "holds"]
    found, warm = rates(schedule, total), max(schedule.warmup_updates(total), 1)
    assert found[-1] == pytest.approx(floor, abs=1e-15)
    assert found[0] > 0
    assert found[warm - 1] == max(found) == 1.0
    assert all(a < b for a, b in pairwise(found[:warm]))
    assert all(a >= b for a, b in pairwise(found[warm - 1 :]))


@pytest.mark.parametrize("schedule", [s for s in ALL if s.warmup == 0.1], ids=repr)
def test_every_setting_changes_a_rate(schedule: AnySchedule) -> None:
    other = {"warmup": 0.3, "total": 20, "floor": 0.4, "decay": 0.5}
    for name, _, _ in settings(schedule):
        assert rates(replace(schedule, **{name: other[name]}), 40) != rates(schedule, 40), name


def test_a_run_of_one_update_has_the_whole_rate() -> None:
    assert [s.share(1, 1) for s in ALL if s.warmup < 1] == [1.0] * 8


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: en.Cosine(warmup=1.5), "warmup: must be a share of the updates below 1 or a whole number .* got 1.5"),
        (lambda: en.Cosine(warmup=1.0), "got 1.0"),
        (lambda: en.Cosine(warmup=-1), "Cosine.warmup: must be a finite number at least 0, got -1"),
        (lambda: en.Linear(floor=1.0), "Linear.floor: must be .* below 1, got 1.0"),
        (lambda: en.WSD(decay=0.0), "WSD.decay: must be .* above 0"),
        (lambda: en.Linear(warmup=10).share(1, 10), "10 updates of warm-up do not fit into 10 updates; give fewer"),
        (lambda: en.WSD(warmup=0.5, decay=0.6).share(1, 40), "more than the whole of 40 updates; lower one of them"),
        (lambda: en.Cosine().share(1), r"cosine needs the number of updates; give en.Cosine\(total=…\)"),
        (lambda: en.AdamW(schedule="cosine"), "AdamW.schedule: must be Constant"),  # type: ignore[arg-type]
    ],
)
def test_a_schedule_that_has_no_meaning_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# --- the engine ------------------------------------------------------------------------------------------------------


def test_an_engine_without_a_run_follows_its_schedule(make_engine: Callable[..., Any], batch: Batch) -> None:
    """Every update equals one of an engine whose rate is set by hand, bit for bit."""
    schedule = en.WSD(warmup=2, decay=0.4, floor=0.2, total=5)
    engine = make_engine(optimizer=en.AdamW(lr=0.1, schedule=schedule))
    by_hand = make_engine(optimizer=en.AdamW(lr=0.1))
    assert engine.learning_rate == 0.1
    for share in [0.5, 1, 1, 0.6, 0.2, 0.2]:
        by_hand.optimizer.param_groups[0]["lr"] = lr = 0.1 * schedule.share(engine.version + 1)
        assert lr == pytest.approx(0.1 * share)
        report = engine.step(batch, en.GRPO())
        by_hand.step(batch, en.GRPO())
        assert report.update.learning_rate == engine.learning_rate == lr
        assert all(torch.equal(a, b) for a, b in zip(engine.parameters, by_hand.parameters, strict=True))


def test_an_engine_without_a_run_needs_the_number_of_updates(make_engine: Callable[..., Any], batch: Batch) -> None:
    engine = make_engine(optimizer=en.AdamW(lr=0.1, schedule=en.Cosine()))
    before = [p.detach().clone() for p in engine.parameters]
    with pytest.raises(ConfigError, match="needs the number of updates"):
        engine.step(batch, en.GRPO())
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters, before, strict=True))
    engine.plan(1, 2)
    assert engine.step(batch, en.GRPO()).update.learning_rate == 0.1
    make_engine(optimizer=en.AdamW(lr=0.1, schedule=en.Constant(warmup=3))).step(batch, en.GRPO())


def test_the_step_is_proved_at_the_whole_rate_and_the_schedule_stays(
    make_engine: Callable[..., Any], batch: Batch
) -> None:
    engine = make_engine(optimizer=en.AdamW(lr=0.1, schedule=en.Cosine(warmup=0.5)))
    assert not prove(engine, en.GRPO(), batch, quick=True).failures
    assert (engine.learning_rate, engine.version) == (0.1, 0)
    engine.plan(1, 20)
    assert engine.step(batch, en.GRPO()).update.learning_rate == pytest.approx(0.01)
