"""The readings by strangers (``tests/audit/reading2026``, ``reading2026b`` to ``m``): what was detected stays
detected, and no right step gets a new alarm. All numbers are in benchmarks/results (benchmarks/audit_blind.py
--strangers)."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest

from benchmarks.audit_blind import READINGS, RESULTS, STRANGERS, judged
from earnest_audit import Step, audit
from tests.audit.reading2026.base import Case, Right
from tests.audit.steps import most

UNFIT = {n: import_module(package).READING.unfit for n, package in enumerate(STRANGERS, 1)}
BOTH = dict.fromkeys((1, 2, 3, 11), (40, 40)) | dict.fromkeys((8, 9), (40, 100)) | {12: (40, 60), 13: (20, 30)}
SIZES = dict.fromkeys(UNFIT, (0, 100)) | BOTH
"""Defects and right steps of each reading."""
CASES = [case for number in UNFIT for case in READINGS[number][1]]
RIGHT = [one for number in UNFIT for one in READINGS[number][2]]


def published(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    found = json.loads((RESULTS / name).read_text())
    return {d["id"]: d for d in found["defects"]}, {r["id"]: r for r in found["right"]}


NOW = [published(f"{READINGS[number][0]}.json") for number in UNFIT]
DEFECTS = {id: d for defects, _ in NOW for id, d in defects.items()}
STEPS = {id: r for _, steps in NOW for id, r in steps.items()}


@pytest.mark.parametrize("number", UNFIT)
def test_every_case_is_published(number: int) -> None:
    name, cases, right, _ = READINGS[number]
    for defects, steps in map(published, (f"{name}_first.json", f"{name}.json")):
        assert list(defects) == [c.id for c in cases] and list(steps) == [r.id for r in right]
        assert (len(defects), len(steps)) == SIZES[number]
        assert {d["source"] for d in defects.values()} == {c.source for c in cases}
        assert set(UNFIT[number]) <= {*defects, *steps}


@pytest.mark.parametrize("number", UNFIT)
def test_every_miss_and_every_false_alarm_has_its_reason(number: int) -> None:
    name, _, _, (missed, accused) = READINGS[number]
    defects, steps = published(f"{name}_first.json")
    assert set(missed) == {d["id"] for d in defects.values() if not d["seen"]}
    alarms = {d["id"] for d in defects.values() if d["fixed"]} | {r["id"] for r in steps.values() if r["alarms"]}
    assert set(accused) == alarms


@pytest.mark.slow
@pytest.mark.may_not_be_checked
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_a_defect_is_seen_as_published(case: Case) -> None:
    published = DEFECTS[case.id]
    assert bool(set(judged(lambda: case.make(True))[0]) - set(published["fixed"])) >= bool(published["seen"])
    assert set(judged(lambda: case.make(False))[0]) <= set(published["fixed"])


ACCUSED = {id for number in UNFIT for id in READINGS[number][3][1]}  # at first: these run in ``make test``


@pytest.mark.may_not_be_checked
@pytest.mark.parametrize(
    "one", [pytest.param(r, id=r.id, marks=() if r.id in ACCUSED else pytest.mark.slow) for r in RIGHT]
)
def test_a_right_step_raises_no_new_alarm(one: Right) -> None:
    assert set(judged(one.make)[0]) <= set(STEPS[one.id]["alarms"])


@pytest.mark.slow
@pytest.mark.may_not_be_checked
@pytest.mark.parametrize("number", READINGS)
def test_a_right_step_is_audited_within_its_budget(number: int) -> None:
    """All that hold, of all readings and of ``tests/audit/blind2026``."""
    _, cases, right, _ = READINGS[number]
    made = [case.make(False) for case in cases] + [one.make() for one in right]
    steps = [s for given in made for s in (given if isinstance(given, list) else [given]) if isinstance(s, Step)]
    costs = [(step.name, audit(step).cost, most(step)) for step in steps]
    assert not [cost for cost in costs if cost[1] > cost[2]] and len(costs) > 10
