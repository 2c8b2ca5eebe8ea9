"""The audit's verdict as verdict.json."""

from __future__ import annotations

from pathlib import Path

from earnest.audit import Verdict
from earnest.disk import write_json
from earnest.runs.folder import read_json

NAME = "verdict.json"


def holds(run: Path) -> bool:
    """Whether this run's step was checked already, and passed."""
    return (run / NAME).exists() and read_json(run / NAME).get("holds") is True


def write(run: Path, verdict: Verdict, step: int, seconds: float) -> None:
    """Write it; what does not apply to this run is left out of the checks and counted."""
    checks = [
        {
            "law": f.law,
            "subject": f.subject,
            "measured": f.measured,
            "expected": f.expected,
            "outcome": f.outcome,
            "detail": f.meaning if f.outcome != "holds" else "",
        }
        for f in verdict.findings
        if f.outcome != "not applicable"
    ]
    left_out = len(verdict.findings) - len(checks)
    write_json(
        run / NAME,
        {
            "holds": verdict.holds,
            "step": step,
            "seconds": round(seconds, 3),
            "not_applicable": left_out,
            "checks": checks,
        },
    )
