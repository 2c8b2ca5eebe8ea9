"""The audit's verdict as verdict.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from earnest.disk import write_json
from earnest.runs.folder import read_json
from earnest_audit import Verdict

NAME = "verdict.json"


def holds(run: Path) -> bool:
    """Whether this run's step was checked already, and passed."""
    return (run / NAME).exists() and read_json(run / NAME).get("holds") is True


def add(run: Path, check: dict[str, Any]) -> None:
    """Append a row to the checks. If there is no file yet (``check: false``), only a failure makes one."""
    path = run / NAME
    if path.exists():
        found = read_json(path)
    elif check["outcome"] == "fails":
        found = {"holds": True, "step": 0, "seconds": 0.0, "not_applicable": 0, "checks": []}
    else:
        return
    kept = [c for c in found["checks"] if c["subject"] != check["subject"]]
    held = bool(found["holds"]) and check["outcome"] != "fails"
    write_json(path, found | {"holds": held, "checks": [*kept, check]})


def write(run: Path, verdict: Verdict, step: int, seconds: float) -> None:
    """Write the verdict. Findings that do not apply to this run are counted, not listed."""
    checks = [
        {name: getattr(f, name) for name in ("law", "subject", "measured", "expected", "outcome")}
        | {"detail": f.meaning if f.outcome != "holds" else ""}
        for f in verdict.findings
        if f.outcome != "not applicable"
    ]
    record = {"holds": verdict.holds, "step": step, "seconds": round(seconds, 3)}
    write_json(run / NAME, record | {"not_applicable": len(verdict.findings) - len(checks), "checks": checks})
