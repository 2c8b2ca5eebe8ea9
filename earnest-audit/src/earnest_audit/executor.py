"""``audit(step)``: every law on one step; model, optimizer and random generators are restored afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from earnest_audit import edits
from earnest_audit.frontends.inference import infer
from earnest_audit.frontends.layout import with_guessed_rows
from earnest_audit.law import Ends, Law
from earnest_audit.laws import LAWS
from earnest_audit.places import caller, place_of
from earnest_audit.probe import Probe
from earnest_audit.step import Loss, Step, StepError
from earnest_audit.subjects import Subject
from earnest_audit.verdict import Finding, Verdict

LISTENERS: list[Callable[[Verdict], None]] = []
"""Each is called with every verdict; `earnest audit SCRIPT.py` collects them here."""
PROGRESS: list[Callable[[str], None]] = []
"""Each is called with the law that begins, where no ``progress`` is given."""
RUNNING: list[object] = []
"""The subjects of the audits that are running now."""


def audit(
    subject: Step | Subject | nn.Module,
    loss: Loss | None = None,
    batch: Mapping[str, Any] | None = None,
    *,
    quick: bool = False,
    laws: Sequence[Law] = LAWS,
    progress: Callable[[str], None] | None = None,
    **declared: Any,
) -> Verdict:
    """Check every law that the declarations allow. ``quick`` leaves out the laws that cost many step times.

    ``audit(model, loss, batch)`` guesses the roles of the batch's tensors (``frontends/inference.py``) and lists the
    guesses in the verdict; ``declared`` are further fields of ``Step``. What the unchanged step raises is raised; what
    it raises when something is changed becomes a row of the verdict.
    """
    if isinstance(subject, nn.Module):
        if loss is None or batch is None:
            raise StepError("a model alone cannot be audited: give audit(model, loss, batch), or audit(Step(…)).")
        subject = infer(subject, loss, batch, **declared)
    elif not isinstance(subject, Step | Subject):
        raise StepError(
            f"a {type(subject).__name__} cannot be audited: give audit(model, loss, batch) in this order, or a Step."
        )
    elif loss is not None or batch is not None or declared:
        what = ", ".join(declared) or "the loss and the batch"
        name = type(subject).__name__
        raise StepError(f"audit({name}(…)) takes nothing beside the {name}: give {what} to {name}(…).")
    RUNNING.append(subject)
    try:
        if isinstance(subject, Step):
            subject = with_guessed_rows(subject)
            verdict = _step(subject, quick, laws, progress)
        else:
            verdict = Verdict(tuple(subject.check()), title=f"{type(subject).__name__}, checked")
    finally:
        RUNNING.pop()
    judged = (f for name, f in vars(subject).items() if callable(f) and name not in ("model", "make", "perturb"))
    verdict = verdict.at(next(filter(None, map(place_of, judged)), "") or caller())
    for listener in LISTENERS:
        listener(verdict)
    return verdict


def _step(subject: Step, quick: bool, laws: Sequence[Law], progress: Callable[[str], None] | None) -> Verdict:
    chosen = [law for law in laws if law.quick or not quick]

    def report(text: str) -> None:
        for show in [progress] if progress is not None else PROGRESS:
            show(text)

    probe = Probe(subject, report)
    findings: list[Finding] = []
    with probe.open():
        probe.own_gradient()  # of the unchanged step: what this raises is the user's to see
        for number, law in enumerate(chosen, 1):
            report(f"law {number}/{len(chosen)}: {law.code} {law.name}")
            findings += checked(law, probe)
    return Verdict(tuple(findings), round(probe.cost, 9), probe.notes + _facts(subject))


def _facts(step: Step) -> tuple[str, ...]:
    terms = {} if step.active is None else step.active.terms
    guesses = ", ".join(f"{name} is a {kind}" for name, kind in step.guesses.items())
    notes = [f"guessed from names: {guesses}; settings={{name: Setting(value, kind)}} declares it"] if guesses else []
    if step.wide is None and len(guess := edits.readings(step)) > 1 and (more := sorted(guess[0] - guess[-1])):
        notes.append(f"guessed from shapes: {', '.join(more)} is padded with the rows; wide=(…) declares it")
    notes += [f"{term} is inactive where this run begins, and was checked {how}" for term, how in terms.items()]
    return (*notes, *step.remarks)


def checked(law: Law, probe: Probe) -> Iterator[Finding]:
    """What the law finds; where it raises, the rows up to there and one for the error. A contrib law only warns."""
    with nullcontext() if law.from_start else probe.active():
        yield from (row if law.tier == "core" else law.doubtful(row) for row in _rows(law, probe))


def _rows(law: Law, probe: Probe) -> Iterator[Finding]:
    probe.law = law
    if not law.when(probe.step):
        return
    for subject, what, given in law.asks:
        if not given(probe.step):
            yield law.not_declared(subject, what)
            return
    if not law.from_start and probe.gradient().norm() == 0:
        yield law.not_applicable(law.name, "not checked: the gradient is 0, see GL")
        return
    if law.spare and not probe.afford(law.spare, keep=0.0):
        yield law.not_applicable(law.name, "not checked: the budget is spent")
        return
    try:
        with probe.perturbed() if law.perturbed else nullcontext():
            yield from law.check(probe)
    except Ends as last:
        yield last.row
    except Exception as error:
        yield law.unchecked(law.name, error)
