"""What a law is: a code of its own, its page (its file's docstring), how it checks, and how its rows are reported."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from earnest_audit.errors import Undeclared
from earnest_audit.step import Step
from earnest_audit.verdict import Finding, Outcome, judged, unchecked

Rows = Iterator[Finding]
Tier = Literal["core", "contrib"]
SECTIONS = ("Needs", "How", "Exceptions", "Warns", "Detects")
Ask = tuple[str, str, Callable[[Step], bool]]
"""A subject, the declaration that it needs, and whether that is given: where it is not, the row is "not declared"."""


@dataclass(eq=False)
class Ends(Exception):
    """Raised by a law, or a part of one: ``row`` is its last row."""

    row: Finding


class Reporter:
    """The rows of a law, or of a subject that has one."""

    code: str

    def finding(self, subject: str, measured: str, expected: str, outcome: Outcome, meaning: str = "") -> Finding:
        return judged(self.code, subject, measured, expected, outcome, meaning)

    def agrees(self, subject: str, off: float, room: float, meaning: str, what: str = "off by {}") -> Finding:
        """Two computations agree: their difference is at most ``room``."""
        return self.finding(subject, what.format(f"{off:.2g}"), f"≤ {room:.2g}", off <= room, meaning)

    def none(self, subject: str, wrong: Sequence[str], measured: str, meaning: str) -> Finding:
        """Nothing is on the list of what is wrong; ``meaning`` begins with the first three."""
        return self.finding(subject, measured, "none", not wrong, ", ".join(wrong[:3]) + meaning)

    def not_applicable(self, subject: str, why: str, meaning: str = "") -> Finding:
        return Finding(self.code, subject, why, "-", "not applicable", meaning)

    def needs(self, given: object, subject: str, why: str, meaning: str = "") -> None:
        """Ends the law, or this part of it, where something is not given."""
        if not given:
            raise Ends(self.not_applicable(subject, why, meaning))

    def not_declared(self, subject: str, what: str) -> Finding:
        """``what`` is the declaration that is missing."""
        return not_declared(self.code, subject, what)

    def unchecked(self, subject: str, error: Exception) -> Finding:
        """The row of a check that raised."""
        undeclared = isinstance(error, Undeclared)
        return self.not_declared(subject, str(error)) if undeclared else unchecked(self.code, subject, error)

    def refused(self, subject: str, error: Exception, what: str = "cannot be run") -> Finding:
        """The row of an edit that the step refuses, as it may."""
        if isinstance(error, Undeclared):
            return self.unchecked(subject, error)
        return self.not_applicable(subject, f"{what} ({type(error).__name__})", str(error)[:120])


@dataclass(frozen=True, eq=False)
class Law(Reporter):
    """``text`` is the docstring of its file: "CODE: sentence", paragraphs, the sections; ``check`` yields findings.

    ``tier``: "core" is true of every correct step and fails, "contrib" is a detector with known exceptions and warns.
    Rows of a core law that have known exceptions are in its section "Warns", with the right steps that do the same.
    """

    code: str
    name: str
    text: str | None
    check: Callable[[Any], Rows]  # of a Probe; a subject's law: of the subject
    tier: Tier = "core"
    quick: bool = True  # cheap enough for --quick
    from_start: bool = False  # judged where training begins, also where terms are inactive there by design
    when: Callable[[Step], bool] = lambda _: True  # the steps that it is about
    asks: tuple[Ask, ...] = ()
    perturbed: bool = False  # judged away from symmetric and zero states
    spare: float = 0.0  # step times that have to be left of the budget, where it is not always checked
    declared: type | None = None  # the dataclass of its subject

    @cached_property
    def sections(self) -> dict[str, str]:
        """Its text by section; before the first one, the "sentence" and the "body" (equations, a table)."""
        text, *parts = re.split(rf"^({'|'.join(SECTIONS)}): ", self.text or "", flags=re.MULTILINE)
        first, _, body = text.strip().partition("\n\n")
        sentence = " ".join(first.removeprefix(f"{self.code}: ").split())
        named = {title: " ".join(part.split()) for title, part in zip(parts[::2], parts[1::2], strict=True)}
        return {"sentence": sentence, "body": body, **named}

    def doubtful(self, row: Finding) -> Finding:
        """A warning in place of a failure. A section may begin with the rows that warn, in parentheses."""
        right = self.sections.get("Warns", self.sections["Exceptions"])
        return row.doubtful(re.sub(r"^\(.*?\) ", "", right))

    @property
    def sentence(self) -> str:
        return self.sections["sentence"]


def not_declared(code: str, subject: str, what: str) -> Finding:
    return Finding(code, subject, "not checked", "-", "not declared", f"Declare {what} and {code} is checked.")
