"""What a law is: one sentence, what it needs declared, how it checks, what fools it, and what it would have caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from earnest.audit.verdict import Finding, Outcome


@dataclass(frozen=True)
class Law:
    """``check`` yields findings; where something is missing it says "not declared", which is never a pass."""

    code: str
    name: str
    sentence: str
    needs: str
    how: str
    traps: str
    caught: str
    check: Callable[[Any], Iterator[Finding]]  # of a Probe; a subject's law: of the subject
    quick: bool = True  # cheap enough for --quick

    def finding(
        self, subject: str, measured: str, expected: str, outcome: Outcome | bool, meaning: str = ""
    ) -> Finding:
        verdict: Outcome = outcome if isinstance(outcome, str) else ("holds" if outcome else "fails")
        return Finding(self.code, subject, measured, expected, verdict, meaning if verdict != "holds" else "")


def not_declared(code: str, subject: str, what: str) -> Finding:
    return Finding(code, subject, "not checked", "-", "not declared", f"Declare {what} and it is checked.")
