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
    say = progress or (lambda _: None)
    probe = Probe(subject, say)
    findings: list[Finding] = []
    with probe.open():
        for law in laws:
            if quick and not law.quick:
                continue
            say(f"{law.code} {law.name}")
            findings += law.check(probe)
    return Verdict(tuple(findings), cost=probe.cost)
