"""The second reading (``tests/audit/blind2026``): what was detected stays detected, and no right step gets a new alarm.
All numbers are in docs/audit-peers.md (benchmarks/audit_blind.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.audit_blind import judged
from tests.audit.blind2026 import CASES, RIGHT
from tests.audit.blind2026.base import Case, Right

PUBLISHED = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "audit_blind.json").read_text())
DEFECTS = {d["id"]: d for d in PUBLISHED["defects"]}
STEPS = {r["id"]: r for r in PUBLISHED["right"]}


def test_every_case_is_published() -> None:
    assert list(DEFECTS) == [c.id for c in CASES] and len({c.id for c in CASES}) == 40
    assert list(STEPS) == [r.id for r in RIGHT] and len({r.id for r in RIGHT}) == 40


@pytest.mark.slow
@pytest.mark.may_not_be_checked
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_a_defect_is_seen_as_published(case: Case) -> None:
    published = DEFECTS[case.id]
    assert bool(set(judged(lambda: case.make(True))[0]) - set(published["fixed"])) >= bool(published["seen"])
    assert set(judged(lambda: case.make(False))[0]) <= set(published["fixed"])


@pytest.mark.slow
@pytest.mark.may_not_be_checked
@pytest.mark.parametrize("one", RIGHT, ids=lambda r: r.id)
def test_a_right_step_raises_no_new_alarm(one: Right) -> None:
    assert set(judged(one.make)[0]) <= set(STEPS[one.id]["alarms"])
