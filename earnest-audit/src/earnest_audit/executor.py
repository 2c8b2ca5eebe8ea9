"""``audit(step)``: every law on one step; model, optimizer and random generators are restored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

from earnest_audit.facts import Metric
from earnest_audit.law import Ends, Law
from earnest_audit.laws import LAWS
from earnest_audit.places import caller, place_of
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.subjects import Subject
from earnest_audit.verdict import Finding, Verdict, judged

LISTENERS: list[Callable[[Verdict], None]] = []
"""Each is called with every verdict; `earnest audit SCRIPT.py` collects them here."""
PROGRESS: list[Callable[[str], None]] = []
"""Each is called with the law that begins, where no ``progress`` is given."""
RUNNING: list[object] = []  # the subjects of the audits that are running now
FROZEN = (
    "No parameter of the model requires a gradient: the step trains nothing, and no other law was checked. Unfreeze "
    "what is trained (requires_grad_(True); a loaded adapter: is_trainable=True), or give the model with the adapter."
)


class Guess(Protocol):
    """A front-end that fills what is not declared (``frontends/names.py``), and lists what it filled."""

    def settings(self, step: Step) -> Step: ...
    def metrics(self, step: Step, returned: Iterable[str]) -> Mapping[str, Metric]: ...
    def notes(self, step: Step, probe: Probe) -> Iterable[str]: ...


def audit(
    subject: Step | Subject,
    *,
    quick: bool = False,
    laws: Sequence[Law] | None = None,
    progress: Callable[[str], None] | None = None,
    guess: Guess | None = None,
) -> Verdict:
    """Check every law (or these ``laws``) that the declarations allow; ``quick``: without those that cost many step
    times. What the unchanged step raises is raised; what it raises when something is changed becomes a row."""
    RUNNING.append(subject)
    try:
        if isinstance(subject, Step):
            chosen = LAWS if laws is None else laws
            verdict = _step(subject, [law for law in chosen if law.quick or not quick], progress, guess)
        else:
            verdict = Verdict(tuple(subject.checked()), title=f"{type(subject).__name__}, checked")
    finally:
        RUNNING.pop()
    functions = (f for name, f in vars(subject).items() if callable(f) and name not in ("model", "make", "perturb"))
    verdict = verdict.at(next(filter(None, map(place_of, functions)), "") or caller())
    announce(verdict)
    return verdict


def announce(verdict: Verdict) -> None:
    for listener in LISTENERS:
        listener(verdict)


def _step(step: Step, laws: Sequence[Law], progress: Callable[[str], None] | None, guess: Guess | None) -> Verdict:
    if not step.trainable():
        return Verdict((judged("GL", "trainable parameters", "0", "at least 1", False, FROZEN),))
    probe = Probe(step) if guess is None else Probe(guess.settings(step), guess.metrics)
    findings: list[Finding] = []
    with probe.open():
        probe.own_gradient()  # of the unchanged step: what this raises is the user's to see
        probe.try_functions()
        for number, law in enumerate(laws, 1):
            for show in PROGRESS if progress is None else [progress]:
                show(f"law {number}/{len(laws)}: {law.code} {law.name}")
            findings += checked(law, probe)
    terms = {} if step.active is None else step.active.terms
    notes = (*probe.notes, *(() if guess is None else guess.notes(step, probe)))
    notes += tuple(f"{term} is inactive where this run begins, and was checked {how}" for term, how in terms.items())
    return Verdict(tuple(findings), round(probe.cost, 9), notes + step.remarks)


def checked(law: Law, probe: Probe) -> Iterator[Finding]:
    """What the law finds; where it raises, the rows up to there and one for the error. A contrib law only warns."""
    with nullcontext() if law.from_start else probe.active():
        yield from (row if law.tier == "core" else law.doubtful(row) for row in _rows(law, probe))


def _rows(law: Law, probe: Probe) -> Iterator[Finding]:
    probe.law = law
    if not law.when(probe.step):
        return
    try:
        for subject, what, given in law.asks:
            if not given(probe.step):
                raise Ends(law.not_declared(subject, what))
        if not law.from_start and probe.gradient().norm() == 0:
            raise Ends(law.not_applicable(law.name, "not checked: the gradient is 0, see GL"))
        if law.spare and not probe.afford(law.spare, keep=0.0):
            raise Ends(law.not_applicable(law.name, "not checked: the budget is spent"))
        with probe.perturbed() if law.perturbed else nullcontext():
            yield from law.check(probe)
    except Ends as last:
        yield last.row
    except Exception as error:
        yield law.unchecked(law.name, error)
