"""``audit(step)``: every law on one step, and everything put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from earnest.audit.law import Law
from earnest.audit.laws import LAWS
from earnest.audit.probe import Probe
from earnest.audit.step import Step
from earnest.audit.subjects import Subject
from earnest.audit.verdict import Finding, Verdict

LISTENERS: list[Callable[[Verdict], None]] = []
"""Each is told every verdict; `earnest audit SCRIPT.py` listens here."""
TELLERS: list[Callable[[str], None]] = []
"""Each is told what an audit is about to do, where no ``progress`` is given."""


def audit(
    subject: Step | Subject,
    *,
    quick: bool = False,
    laws: Sequence[Law] = LAWS,
    progress: Callable[[str], None] | None = None,
) -> Verdict:
    """Check every law that the declarations allow. ``quick`` leaves out the laws that cost many step times."""
    verdict = _step(subject, quick, laws, progress) if isinstance(subject, Step) else Verdict(tuple(subject.check()))
    for tell in LISTENERS:
        tell(verdict)
    return verdict


def _step(subject: Step, quick: bool, laws: Sequence[Law], progress: Callable[[str], None] | None) -> Verdict:
    chosen = [law for law in laws if law.quick or not quick]

    def say(text: str) -> None:
        for tell in [progress] if progress is not None else TELLERS:
            tell(text)

    probe = Probe(subject, say)
    findings: list[Finding] = []
    with probe.open():
        for number, law in enumerate(chosen, 1):
            say(f"law {number}/{len(chosen)}: {law.code} {law.name}")
            findings += law.check(probe)
    return Verdict(tuple(findings), cost=probe.cost)
