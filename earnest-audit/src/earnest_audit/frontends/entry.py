"""``audit``, as users call it: what is not declared is guessed first, and the verdict lists the guesses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from earnest_audit import executor
from earnest_audit.frontends import names
from earnest_audit.frontends.inference import infer
from earnest_audit.frontends.layout import with_guessed_rows
from earnest_audit.law import Law
from earnest_audit.step import Loss, Step, StepError
from earnest_audit.subjects import Subject
from earnest_audit.verdict import Verdict


def audit(
    subject: Step | Subject | nn.Module,
    loss: Loss | None = None,
    batch: Mapping[str, Any] | None = None,
    *,
    quick: bool = False,
    laws: Sequence[Law] | None = None,
    progress: Callable[[str], None] | None = None,
    **declared: Any,
) -> Verdict:
    """Check every law (or these ``laws``) that the declarations allow: ``audit(Step(…))``, or another subject.
    ``quick`` leaves out the laws that cost many step times.

    ``audit(model, loss, batch)`` guesses the roles of the batch's tensors by perturbation and lists the guesses in the
    verdict; ``declared`` are further fields of ``Step``. What the unchanged step raises is raised; what it raises when
    something is changed becomes a row of the verdict.
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
    if isinstance(subject, Step):
        subject = with_guessed_rows(subject)
    return executor.audit(subject, quick=quick, laws=laws, progress=progress, guess=names)
