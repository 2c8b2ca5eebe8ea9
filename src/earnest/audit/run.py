"""``audit(step)``: every law on one step, and everything put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from earnest.audit.law import Law
from earnest.audit.laws import LAWS
from earnest.audit.probe import Probe
from earnest.audit.step import Step
from earnest.audit.subjects import Subject
from earnest.audit.verdict import Finding, Verdict, unchecked

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
    """Check every law that the declarations allow. ``quick`` leaves out the laws that cost many step times.

    What the step itself raises as it is goes through; what it raises when something is changed is a row of its own.
    """
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
        probe.gradient()  # as it is: what this raises is the user's to see
        for number, law in enumerate(chosen, 1):
            say(f"law {number}/{len(chosen)}: {law.code} {law.name}")
            findings += checked(law, probe)
    return Verdict(tuple(findings), probe.cost, probe.notes)


def checked(law: Law, probe: Probe) -> Iterator[Finding]:
    """What the law finds; where it raises, the rows up to there and one that says so."""
    try:
        yield from law.check(probe)
    except Exception as error:
        yield unchecked(law.code, law.name, error)
