"""Schedules of the learning rate."""

from __future__ import annotations

import math
from functools import partial

from earnest_audit import Schedule
from tests.audit.blind2026.base import Thing, case

PEAK, TOTAL, WARMUP = 3e-4, 40, 5


def cosine(progress: float, floor: float = 0.0) -> float:
    return floor + (PEAK - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, progress))))


def warm_cosine(step: int, total: int, warmup: int = WARMUP, floor: float = 0.0) -> float:
    if step < warmup:
        return PEAK * (step + 1) / warmup
    return cosine((step - warmup) / max(1, total - 1 - warmup), floor)


@case("facebookresearch/fairchem#1967", "schedules", "the cosine runs during the warm-up, so the rate drops at its end")
def cosine_runs_during_the_warmup(broken: bool) -> Thing:
    def rates(total: int, ranks: int) -> list[float]:
        warmup = total // 3
        if not broken:
            return [warm_cosine(k, total, warmup) for k in range(total)]
        return [PEAK * (k + 1) / warmup if k < warmup else cosine(k / (total - 1)) for k in range(total)]

    return Schedule(rates, peak=PEAK, final=0.0, total=TOTAL, warmup=TOTAL // 3)


@case("Tencent-Hunyuan/UniRL#223", "schedules", "there is no warm-up, and the rate rises again at the end")
def no_warmup_and_a_rebound(broken: bool) -> Thing:
    def rates(total: int, ranks: int) -> list[float]:
        if not broken:
            return [warm_cosine(k, total) for k in range(total)]
        return [PEAK * 0.5 * (1 + math.cos(math.pi * k / (total - 3 * WARMUP))) for k in range(total)]

    return Schedule(rates, peak=PEAK, final=0.0, total=TOTAL, warmup=WARMUP)


@case("NovaSky-AI/SkyRL#873", "schedules", "the plan counts rollout batches, of which each has two updates")
def plan_in_rollout_batches(broken: bool) -> Thing:
    def rates(total: int, ranks: int) -> list[float]:
        planned = total // 2 if broken else total
        return [warm_cosine(min(k, planned - 1), planned) for k in range(total)]

    return Schedule(rates, peak=PEAK, final=0.0, total=TOTAL, warmup=WARMUP)


@case("AI-Hypercomputer/maxtext#4225", "schedules", "the warm-up is a share of another run's length and never ends")
def warmup_of_another_length(broken: bool) -> Thing:
    def rates(total: int, ranks: int) -> list[float]:
        planned = 3000 if broken else total
        return [warm_cosine(k, planned, planned // 10) for k in range(total)]

    return Schedule(rates, peak=PEAK, final=0.0, total=TOTAL, warmup=TOTAL // 10)


@case("AI-Hypercomputer/maxtext#4029", "schedules", "the setting for the length of the schedule is not read")
def schedule_length_not_read(broken: bool) -> Thing:
    def rates(total: int, ranks: int, schedule_steps: float = TOTAL) -> list[float]:
        planned = total if broken else int(total * schedule_steps / TOTAL)
        return [warm_cosine(min(k, planned - 1), planned) for k in range(total)]

    return Schedule(
        partial(rates), peak=PEAK, final=0.0, total=TOTAL, warmup=WARMUP, settings={"schedule_steps": float(TOTAL)}
    )
