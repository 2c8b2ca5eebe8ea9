"""Thirty real defects, each beside its fix: the defect is detected by a law that its description names, the fix raises
nothing."""

from __future__ import annotations

import pytest

from earnest_audit import Step, audit
from tests.audit.corpus import losses, machinery, policy
from tests.audit.corpus.base import DEFECTS, Defect
from tests.audit.steps import most

assert losses and machinery and policy


NAMES = [d.id for d in DEFECTS]


def test_all_thirty_rows_are_here() -> None:
    assert sorted({int("".join(c for c in name if c.isdigit())) for name in NAMES}) == list(range(1, 31))


@pytest.mark.parametrize("defect", DEFECTS, ids=NAMES)
def test_the_defect_is_seen(defect: Defect) -> None:
    verdict = audit(defect.broken())
    seen = {f.law for f in verdict.failures}
    assert seen & defect.laws, (
        f"{defect.what}: failures of {seen or 'no law'}, expected one of {set(defect.laws)}\n{verdict}"
    )


@pytest.mark.parametrize("defect", DEFECTS, ids=NAMES)
def test_the_fix_raises_nothing(defect: Defect) -> None:
    step = defect.mended()
    verdict = audit(step)
    assert not verdict.failures and verdict.holds, str(verdict)
    assert not isinstance(step, Step) or verdict.cost <= most(step)
