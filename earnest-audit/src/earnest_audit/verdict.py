"""What an audit found: one row per law and subject, and never a pass for what was not checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table

from earnest_audit.errors import EarnestError

LawOutcome = Literal["holds", "fails", "not applicable", "not declared"]
UNCHECKED = "could not be checked ("
COLOURS: dict[LawOutcome, str] = {
    "holds": "green",
    "fails": "bold red",
    "not applicable": "dim",
    "not declared": "yellow",
}


class LawBroken(EarnestError):
    """A training step broke a law; the message lists each failure with what it means."""


@dataclass(frozen=True)
class Finding:
    """One law on one subject. ``meaning``: what a failure means, and where to look."""

    law: str
    subject: str
    measured: str
    expected: str
    outcome: LawOutcome
    meaning: str = ""


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
    def errors(self) -> tuple[Finding, ...]:
        """What could not be checked because something raised: neither a failure nor a pass."""
        return tuple(f for f in self.findings if f.measured.startswith(UNCHECKED))

    @property
    def holds(self) -> bool:
        """True where something was checked and nothing failed."""
        return not self.failures and any(f.outcome == "holds" for f in self.findings)

    def raise_if_failed(self) -> Verdict:
        """Raise ``LawBroken`` unless something was checked and nothing failed; otherwise return the verdict."""
        if not self.holds:
            lines = [f"{f.law} on {f.subject}: {f.measured}, expected {f.expected}. {f.meaning}" for f in self.failures]
            raise LawBroken(
                "the training step breaks a law:\n  " + "\n  ".join(lines) if lines else "nothing was checked."
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """JSON for machines (verdict.json)."""
        counts = {outcome: sum(f.outcome == outcome for f in self.findings) for outcome in COLOURS}
        return {
            "holds": self.holds,
            "counts": counts,
            "cost": self.cost,
            "notes": list(self.notes),
            "findings": [asdict(f) for f in self.findings],
        }

    def __add__(self, other: Verdict) -> Verdict:
        notes = tuple(dict.fromkeys(self.notes + other.notes))
        return Verdict(self.findings + other.findings, self.cost + other.cost, notes, self.title)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=escape(self.title), title_justify="left")
        for column in ("law", "subject", "measured", "expected", "verdict"):
            table.add_column(column)
        for f in self.findings:
            cells = (escape(cell) for cell in (f.law, f.subject, f.measured, f.expected))
            table.add_row(*cells, f"[{COLOURS[f.outcome]}]{f.outcome}[/]")
        yield table
        for note in self.notes:
            yield f"[dim]· {escape(note)}[/]"
        for missing in dict.fromkeys(f.meaning for f in self.findings if f.outcome == "not declared" and f.meaning):
            yield f"[dim]· {escape(missing)}[/]"
        for f in self.failures:
            yield f"[red]✗[/] {escape(f'{f.law} on {f.subject}: {f.meaning}')}"

    def __str__(self) -> str:
        console = Console(width=120, force_terminal=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


def unchecked(code: str, subject: str, error: Exception) -> Finding:
    """The row of what raised while it was checked."""
    text = " ".join(str(error).split())
    what = f"{UNCHECKED}{type(error).__name__}: {text[:160]}{'…' if len(text) > 160 else ''})"
    return Finding(
        code, subject, what, "-", "not applicable",
        "The unchanged step runs, but raised when the law changed something: the law was not checked.",
    )  # fmt: skip


def collect(findings: Sequence[Finding]) -> Verdict:
    return Verdict(tuple(findings))
