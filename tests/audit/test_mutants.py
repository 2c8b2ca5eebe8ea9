"""Blind mutants of correct steps, a fixed sample of them: how many the audit sees must not fall. All of them, and which
are missed, are in docs/audit-evidence.md (benchmarks/audit_mutants.py)."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.audit_mutants import FAMILIES, judge, plan

STRIDE = 17


PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "results" / "audit_mutants.json"


def test_a_sample_is_seen_as_often_as_published() -> None:
    found = json.loads(PUBLISHED.read_text())
    mutants = plan()
    assert [(f, m.what) for f, m in mutants] == [(f["family"], f["what"]) for f in found], (
        "the mutants are not those of the published results; run benchmarks/audit_mutants.py again"
    )
    chosen = range(0, len(mutants), STRIDE)
    assert {mutants[i][0] for i in chosen} == set(FAMILIES)
    now = {i: judge(*mutants[i])[0] for i in chosen}
    seen = [i for i in chosen if found[i]["outcome"] == "seen"]
    lost = [f"{mutants[i][0]}: {mutants[i][1].what} is {now[i]}" for i in seen if now[i] != "seen"]
    assert len(seen) >= 8 and not lost, lost
