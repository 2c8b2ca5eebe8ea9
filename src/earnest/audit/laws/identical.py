"""LAW, divergences and preferences: what is identical costs nothing and pulls nowhere.

teacher = student               →  divergence 0, gradient 0
chosen = rejected, token by token →  gradient 0
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from earnest.audit import edits
from earnest.audit.law import Law, not_declared
from earnest.audit.laws.on_policy import quiet_knobs
from earnest.audit.probe import Probe, fresh, seeded
from earnest.audit.verdict import Finding


def check(probe: Probe) -> Iterator[Finding]:
    if "teacher" in probe.step.roles:
        yield from _teacher(probe)
    if {"chosen", "rejected"} <= probe.step.roles.keys():
        yield from _pair(probe)


def _teacher(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    if step.student is None:
        yield not_declared("LAW", "identical distributions", "student=lambda model, batch: …, in the teacher's form,")
        return
    key = step.roles["teacher"]
    with probe.kicked():
        usual_loss, _ = probe.evaluate()
        usual = probe.gradient()
        with seeded(step.seed), torch.no_grad():
            own = step.student(step.model, fresh(step.batch))
        batch = {**step.batch, key: own.detach().to(step.batch[key].dtype).reshape(step.batch[key].shape)}
        loss, _ = probe.evaluate(batch)
        gradient = probe.gradient(batch)
    scale = max(abs(float(usual_loss.detach())), 1e-12)
    # A divergence is quadratic at its zero, so its gradient there is of the order of sqrt(eps) at worst.
    room = max(probe.tolerance, torch.finfo(own.dtype).eps ** 0.5 if own.is_floating_point() else 1e-3)
    pull = gradient.norm() / max(usual.norm(), 1e-300)
    yield LAW.finding(
        "identical distributions",
        f"cost {float(loss.detach()):.2g} (usually {scale:.2g}), gradient {pull:.2g} of the usual",
        "0 and 0",
        abs(float(loss.detach())) <= room * max(scale, 1.0) and pull <= room and gradient.finite(),
        "A student that equals its teacher is still pushed: mixture weights are swapped, log-probs are mixed in place of "
        "probabilities, supports differ, or a temperature is applied to one side only.",
    )
    yield LAW.finding(
        "different distributions",
        f"cost {float(usual_loss.detach()):.2g}, gradient {usual.norm():.2g}",
        "not 0",
        usual.norm() > 0,
        "The divergence is 0 for different distributions: its mixture is the student itself (α = 0 not special-cased), or a softmax "
        "runs over an axis of length 1.",
    )


def _pair(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    chosen, rejected = step.batch[step.roles["chosen"]], step.batch[step.roles["rejected"]]
    if chosen.shape != rejected.shape:
        yield Finding(
            "LAW",
            "identical pairs",
            "shapes differ",
            "-",
            "not applicable",
            "chosen and rejected are padded differently.",
        )
        return
    batch: edits.Batch = dict(step.batch)
    batch[step.roles["rejected"]] = chosen.clone()
    for key in list(batch):  # masks, labels and attention go with their ids
        twin = key.replace("rejected", "chosen")
        if "rejected" in key and twin in batch and key not in (step.roles.get("reference_rejected"),):
            batch[key] = batch[twin]
    if {"reference_chosen", "reference_rejected"} <= step.roles.keys():
        batch[step.roles["reference_rejected"]] = batch[step.roles["reference_chosen"]]
    with probe.kicked():
        usual = probe.gradient(None, quiet_knobs(probe))
        same = probe.gradient(batch, quiet_knobs(probe))
    pull = same.norm() / max(usual.norm(), 1e-300)
    yield LAW.finding(
        "identical pairs",
        f"gradient {pull:.2g} of the usual",
        "0",
        pull <= probe.tolerance,
        "A pair whose two answers are one text has nothing to prefer, yet it pulls: roles are mixed up, one side is masked or "
        "normalised differently, or another term is in the loss.",
    )


LAW = Law(
    code="LAW",
    name="identical",
    sentence="Identical distributions cost 0 and pull nowhere; so do identical pairs; different ones do not cost 0.",
    needs="roles teacher and student=fn, or roles chosen and rejected",
    how="The teacher is replaced by the student's own output, the rejected answer by the chosen one.",
    traps="In fp32 a mixture leaves about 1e-7; the tolerance follows from the dtype.",
    caught="a log-softmax over an axis of length 1 (always 0), CLaaS α = 0, transformers #45120, swapped mixture weights",
    check=check,
    quick=False,
)
