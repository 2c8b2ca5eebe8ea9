"""A subject is something that is not a loss, declared like one, with laws of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from earnest.audit.verdict import Finding


@runtime_checkable
class Subject(Protocol):
    """``check`` yields findings; it leaves what it was given as it was."""

    def check(self) -> Iterator[Finding]: ...


def judged(code: str, subject: str, measured: str, expected: str, holds: bool, meaning: str) -> Finding:
    return Finding(code, subject, measured, expected, "holds" if holds else "fails", "" if holds else meaning)
