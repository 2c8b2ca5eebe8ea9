"""The reading by strangers (``tests/audit/reading2026``): what was detected stays detected, and no right step gets a
new alarm. All numbers are in docs/audit-evidence.md (benchmarks/audit_blind.py --strangers)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.audit_blind import failures
from tests.audit.reading2026 import READING
from tests.audit.reading2026.base import Case, Right
from tests.audit.reading2026.reasons import ALARMS, MISSES

CASES, RIGHT, NO_SUBJECT = READING.cases, READING.right, READING.unfit
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def published(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    found = json.loads((RESULTS / name).read_text())
    return {d["id"]: d for d in found["defects"]}, {r["id"]: r for r in found["right"]}


DEFECTS, STEPS = published("audit_blind_strangers.json")


def test_every_case_is_published() -> None:
    for defects, steps in (published("audit_blind_strangers_first.json"), (DEFECTS, STEPS)):
        assert list(defects) == [c.id for c in CASES] and len(defects) == 40
        assert list(steps) == [r.id for r in RIGHT] and len(steps) == 40
        assert {d["source"] for d in defects.values()} == {c.source for c in CASES}
    assert set(NO_SUBJECT) <= {*DEFECTS, *STEPS}


def test_every_miss_and_every_false_alarm_has_its_reason() -> None:
    defects, steps = published("audit_blind_strangers_first.json")
    assert set(MISSES) == {d["id"] for d in defects.values() if not d["seen"]}
    alarms = {d["id"] for d in defects.values() if d["fixed"]} | {r["id"] for r in steps.values() if r["alarms"]}
    assert set(ALARMS) == alarms


@pytest.mark.slow
@pytest.mark.may_not_be_checked
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_a_defect_is_seen_as_published(case: Case) -> None:
    published = DEFECTS[case.id]
    assert bool(set(failures(lambda: case.make(True))) - set(published["fixed"])) >= bool(published["seen"])
    assert set(failures(lambda: case.make(False))) <= set(published["fixed"])


@pytest.mark.slow
@pytest.mark.may_not_be_checked
@pytest.mark.parametrize("one", RIGHT, ids=lambda r: r.id)
def test_a_right_step_raises_no_new_alarm(one: Right) -> None:
    assert set(failures(one.make)) <= set(STEPS[one.id]["alarms"])
