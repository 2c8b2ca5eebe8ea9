"""LAW, divergences and preferences: what is identical costs nothing and pulls nowhere.

teacher = student               →  divergence 0, gradient 0
chosen = rejected, token by token →  gradient 0
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from earnest.audit import edits
from earnest.audit.gradient import Gradient
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
        usual_loss, usual = probe.read().loss, probe.gradient()
        with seeded(step.seed), torch.no_grad():
            own = step.student(step.model, fresh(step.batch))
        batch = {**step.batch, key: own.detach().to(step.batch[key].dtype).reshape(step.batch[key].shape)}
        reading = probe.read(batch)
    loss, gradient = reading.loss, reading.gradient
    scale = max(abs(usual_loss), 1e-12)
    # A divergence is quadratic at its zero, so its gradient there is of the order of sqrt(eps) at worst.
    room = max(probe.tolerance, torch.finfo(own.dtype).eps ** 0.5 if own.is_floating_point() else 1e-3)
    pull = gradient.norm() / max(usual.norm(), 1e-300)
    yield LAW.finding(
        "identical distributions",
        f"cost {loss:.2g} (usually {scale:.2g}), gradient {pull:.2g} of the usual",
        "0 and 0",
        abs(loss) <= room * max(scale, 1.0) and pull <= room and gradient.finite(),
        "A student that equals its teacher is still pushed: mixture weights are swapped, log-probs are mixed in "
        "place of probabilities, supports differ, or a temperature is applied to one side only.",
    )
    yield LAW.finding(
        "different distributions",
        f"cost {usual_loss:.2g}, gradient {usual.norm():.2g}",
        "not 0",
        usual.norm() > 0,
        "The divergence is 0 for different distributions: its mixture is the student itself (α = 0 not "
        "special-cased), or a softmax runs over an axis of length 1.",
    )
    yield from _bounded(probe, key)


def _bounded(probe: Probe, key: str) -> Iterator[Finding]:
    """GJS_α ≤ H(α): swapped outer weights break it, at any α but ½."""
    step = probe.step
    knob = next((k for k in ("alpha", "beta", "jsd_beta", "jsd_alpha") if isinstance(step.knobs.get(k), float)), None)
    if knob is None or not 0 < float(step.knobs[knob]) < 1 or step.batch[key].ndim < 3:
        return
    alpha = 0.1
    entropy = -alpha * math.log(alpha) - (1 - alpha) * math.log(1 - alpha)
    far = torch.full_like(step.batch[key], -40.0)
    lowest = step.batch[key].argmin(-1, keepdim=True)
    far = far.scatter(-1, lowest, 40.0)
    twice = probe.gradient(edits.repeat_rows(step)).best_scale(probe.gradient())
    if abs(twice - 1) > 0.01:
        return  # a sum, not a mean: its bound depends on how many tokens there are
    value = probe.look({**step.batch, key: far}, {knob: alpha}).loss
    yield LAW.finding(
        f"bound at {knob} = {alpha}",
        f"{value:.3g} for a teacher far away",
        f"≤ H({alpha}) = {entropy:.3g}, above 0",
        0 < value <= entropy * 1.01,
        "A generalised Jensen–Shannon divergence cannot exceed the binary entropy of its weight: the mixture's "
        "weights are swapped against the outer ones, a factor is lost, or it is another divergence than its setting "
        "says.",
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
        "A pair whose two answers are one text has nothing to prefer, yet it pulls: roles are mixed up, one side is "
        "masked or normalised differently, or another term is in the loss.",
    )
    yield from _margin(probe)


def _margin(probe: Probe) -> Iterator[Finding]:
    """Descending the loss must widen the margin; and at the reference every pair pulls alike."""
    step = probe.step
    if step.logprobs is None:
        yield not_declared("DR", "the margin", "logprobs=lambda model, batch: (chosen [P], rejected [P])")
        return
    with probe.kicked():
        wider = _margin_gradient(probe, step.batch)
        down = probe.gradient()
        cosine = -down.dot(wider) / max(down.norm() * wider.norm(), 1e-300)
        yield LAW.finding(
            "descending widens the margin",
            f"cosine {cosine:+.2f} between -∇L and ∇(chosen - rejected)",
            "above 0",
            cosine > 0.05,
            "Training prefers the rejected answers: a sign is lost, or chosen and rejected are swapped.",
        )
        if not {"reference_chosen", "reference_rejected"} <= step.roles.keys():
            return
        with seeded(step.seed), torch.no_grad():
            chosen, rejected = step.logprobs(step.model, fresh(step.batch))
        keys = step.roles["reference_chosen"], step.roles["reference_rejected"]
        at = {**step.batch, keys[0]: chosen.detach(), keys[1]: rejected.detach()}
        gradient = probe.gradient(at)
    alike = abs(gradient.dot(wider)) / max(gradient.norm() * wider.norm(), 1e-300)
    yield LAW.finding(
        "at the reference every pair pulls alike",
        f"cosine {alike:.3f} between ∇L and the plain sum over pairs",
        "1",
        alike > 1 - max(probe.tolerance, 1e-2),
        "Where the policy equals the reference all margins are 0 and all pairs weigh the same. They do not: the "
        "reference enters with the wrong sign, on the wrong side, or normalised differently.",
    )


def _margin_gradient(probe: Probe, batch: Mapping[str, Any]) -> Gradient:
    assert probe.step.logprobs is not None
    probe.cost += 1
    with seeded(probe.step.seed), torch.enable_grad():
        chosen, rejected = probe.step.logprobs(probe.step.model, fresh(batch))
    found = probe.differentiate((chosen - rejected).sum(), list(probe.parameters.values()))
    return Gradient(dict(zip(probe.parameters, found, strict=True)))


LAW = Law(
    code="LAW",
    name="identical",
    sentence="Identical distributions cost 0 and pull nowhere; so do identical pairs; different ones do not cost 0.",
    needs="roles teacher and student=fn, or roles chosen and rejected",
    how="The teacher is replaced by the student's own output, the rejected answer by the chosen one.",
    traps="In fp32 a mixture leaves about 1e-7; the tolerance follows from the dtype.",
    caught="a log-softmax over an axis of length 1 (always 0), CLaaS α = 0, transformers #45120, swapped mixture "
    "weights",
    check=check,
    quick=False,
)
