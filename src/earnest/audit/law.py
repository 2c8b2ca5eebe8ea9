"""What a law is: its statement, the declarations that it needs, how it checks, its exceptions, and what it detects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from earnest.audit.verdict import Finding, LawOutcome, unchecked


@dataclass(frozen=True)
class Law:
    """``check`` yields findings; a missing declaration gives "not declared", which is never a pass."""

    code: str
    name: str
    sentence: str
    needs: str
    how: str
    traps: str
    caught: str
    check: Callable[[Any], Iterator[Finding]]  # of a Probe; a subject's law: of the subject
    quick: bool = True  # cheap enough for --quick
    from_start: bool = False  # judged where training begins, also where terms are inactive there by design

    def finding(
        self, subject: str, measured: str, expected: str, outcome: LawOutcome | bool, meaning: str = ""
    ) -> Finding:
        verdict: LawOutcome = outcome if isinstance(outcome, str) else ("holds" if outcome else "fails")
        return Finding(self.code, subject, measured, expected, verdict, meaning if verdict != "holds" else "")

    def not_applicable(self, subject: str, why: str, meaning: str = "") -> Finding:
        return Finding(self.code, subject, why, "-", "not applicable", meaning)

    def not_declared(self, subject: str, what: str) -> Finding:
        """``what`` is the declaration that is missing."""
        return not_declared(self.code, subject, what)

    def unchecked(self, subject: str, error: Exception) -> Finding:
        """The row of a check that raised."""
        return unchecked(self.code, subject, error)


def not_declared(code: str, subject: str, what: str) -> Finding:
    return Finding(code, subject, "not checked", "-", "not declared", f"Declare {what} and it is checked.")
