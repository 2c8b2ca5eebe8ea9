"""What an audit found: one row per law and subject, and never a pass for what was not checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from earnest_audit.errors import EarnestError

if TYPE_CHECKING:  # rich is optional: it is imported only where a rich console prints a verdict
    from rich.console import Console, ConsoleOptions, RenderResult

LawOutcome = Literal["holds", "fails", "warns", "not applicable", "not declared"]
UNCHECKED = "could not be checked ("
OUTCOMES: tuple[LawOutcome, ...] = ("holds", "fails", "warns", "not applicable", "not declared")
Outcome = LawOutcome | bool
"""True is "holds" and False "fails"."""


class LawBroken(EarnestError):
    """A training step broke a law; the message lists each failure with what it means."""


@dataclass(frozen=True)
class Finding:
    """One law on one subject. ``meaning``: what a failure or a warning means, and where to look. ``place``: the source
    of what was checked, "train.py:12". ``outcome``: "warns" where right steps are known that do the same."""

    law: str
    subject: str
    measured: str
    expected: str
    outcome: LawOutcome
    meaning: str = ""
    place: str = ""

    def __str__(self) -> str:
        return f"{self.law} on {self.subject}: {self.measured}, expected {self.expected}. {self.meaning}".rstrip()

    @property
    def line(self) -> str:
        """What it means and where, as printed below a table."""
        where = f" ({self.place})" if self.place else ""
        return f"{self.law} on {self.subject}: {self.meaning}".rstrip() + where

    def doubtful(self, right: str) -> Finding:
        """A warning in place of a failure; every other row as it is. ``right``: which right steps do the same."""
        meaning = f"{self.meaning} Right steps do the same: {right}".strip()
        return replace(self, outcome="warns", meaning=meaning) if self.outcome == "fails" else self


@dataclass(frozen=True)
class Verdict:
    """All findings of an audit. ``notes``: what differed from the user's run during the audit."""

    findings: tuple[Finding, ...]
    cost: float = 0.0  # in step times
    notes: tuple[str, ...] = ()
    title: str = "the training step, checked"  # of its table

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.outcome == "fails")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What is unusual and may be right: a verdict with warnings alone holds."""
        return tuple(f for f in self.findings if f.outcome == "warns")

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What could not be checked because something raised: neither a failure nor a pass."""
        return tuple(f for f in self.findings if f.outcome == "not applicable" and f.measured.startswith(UNCHECKED))

    @property
    def holds(self) -> bool:
        """True where something was checked and nothing failed; a row that warns was checked."""
        return not self.failures and any(f.outcome in ("holds", "warns") for f in self.findings)

    @property
    def counts(self) -> dict[LawOutcome, int]:
        return {outcome: sum(f.outcome == outcome for f in self.findings) for outcome in OUTCOMES}

    @property
    def summary(self) -> str:
        """One line: "12 hold, 1 fails, 2 warn, 1 could not be checked, 2 not applicable, 3 not declared"."""
        counts, raised = self.counts, len(self.errors)
        counts["not applicable"] -= raised
        held, failed, warned = (counts.pop(outcome) for outcome in ("holds", "fails", "warns"))
        first = [f"{held} hold{'s' if held == 1 else ''}", f"{failed} fail{'s' if failed == 1 else ''}"]
        first += [f"{warned} warn{'s' if warned == 1 else ''}"] if warned else []
        first += [f"{raised} could not be checked"] if raised else []
        return ", ".join([*first, *(f"{count} {outcome}" for outcome, count in counts.items() if count)])

    def raise_if_failed(self) -> Verdict:
        """Raise ``LawBroken`` unless something was checked and nothing failed; otherwise return the verdict."""
        if not self.holds:
            lines = "\n  ".join(map(str, self.failures))
            raise LawBroken(f"the training step breaks a law:\n  {lines}" if lines else "nothing was checked.")
        return self

    def strict(self) -> Verdict:
        """The verdict with every warning, and everything that could not be checked, as a failure."""
        strict = {
            f: replace(f, outcome="fails", meaning=f"{f.meaning} (A failure in strict mode.)")
            for f in (*self.warnings, *self.errors)
        }
        return replace(self, findings=tuple(strict.get(f, f) for f in self.findings))

    def to_dict(self) -> dict[str, Any]:
        """JSON for machines (verdict.json)."""
        found = {**asdict(self), "notes": list(self.notes), "findings": [asdict(f) for f in self.findings]}
        return {"title": self.title, "holds": self.holds, "counts": self.counts, **found}

    def __add__(self, other: Verdict) -> Verdict:
        notes = tuple(dict.fromkeys(self.notes + other.notes))
        return Verdict(self.findings + other.findings, self.cost + other.cost, notes, self.title)

    def at(self, place: str) -> Verdict:
        """The verdict with ``place`` on every finding that has none."""
        return replace(self, findings=tuple(f if f.place else replace(f, place=place) for f in self.findings))

    def remarks(self) -> Iterator[str]:
        """The lines below the table, beside failures: notes, and what to declare."""
        yield from self.notes
        yield from dict.fromkeys(f.meaning for f in self.findings if f.outcome == "not declared" and f.meaning)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from earnest_audit.frontends import terminal

        return terminal.coloured(self)

    def __str__(self) -> str:
        """The table in plain text."""
        from earnest_audit.frontends import terminal

        return terminal.plain(self)


def judged(law: str, subject: str, measured: str, expected: str, outcome: Outcome, meaning: str = "") -> Finding:
    """A row; what holds has no meaning."""
    verdict: LawOutcome = outcome if isinstance(outcome, str) else ("holds" if outcome else "fails")
    return Finding(law, subject, measured, expected, verdict, "" if verdict == "holds" else meaning)


CHANGED = "The unchanged step runs, but raised when the law changed something: the law was not checked."


def unchecked(code: str, subject: str, error: Exception, meaning: str = CHANGED) -> Finding:
    """The row of what raised while it was checked."""
    text = " ".join(str(error).split())
    what = f"{UNCHECKED}{type(error).__name__}: {text[:160]}{'…' if len(text) > 160 else ''})"
    return Finding(code, subject, what, "-", "not applicable", meaning)
