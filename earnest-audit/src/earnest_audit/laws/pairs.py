"""PAIR: A pair of two identical answers has a zero gradient, descending the loss widens the margin, and at the
reference every pair has the same weight.

chosen = rejected, token by token   →   gradient 0
lp = reference                      →   every pair has the same weight, towards a wider margin

Needs: roles chosen and rejected; logprobs=fn for the margin; the weight of any other term in the loss
How: The rejected answer is replaced by the chosen one; the margin's own gradient is compared; a label smoothing ε is
compared with 1 - ε on swapped answers. Sums and averages of ``logprobs`` are tried, references keep their own unit.
Exceptions: SPPO, NCA and BCO weigh each answer by itself: pairwise=False. IPO pulls a margin that is beyond its target
back.
Detects: sign errors, swapped or differently masked answers, a smoothed half with a wrong sign
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.gradient import Gradient
from earnest_audit.law import Law, Rows
from earnest_audit.laws.parts import Part, RelativeGradient, weakest
from earnest_audit.limits import NEAR, beside
from earnest_audit.probe import Probe
from earnest_audit.step import Step

REFERENCES = ("reference_chosen", "reference_rejected")
TERMS = 'pairwise=True, and settings={name: Setting(value, "weight")} for every term beside the pairs,'
IDENTICAL, ALIKE = "identical pairs", "at the reference every pair has the same weight"


def check(probe: Probe) -> Rows:
    step, pull = probe.step, None
    if step.pairwise is False:
        yield LAW.not_applicable(IDENTICAL, "each answer is weighed by itself, by declaration")
    elif step.batch[step.roles["chosen"]].shape != step.batch[step.roles["rejected"]].shape:
        yield LAW.not_applicable(IDENTICAL, "shapes differ", "chosen and rejected are padded differently.")
    else:
        same = probe.kept_batch(IDENTICAL, lambda: _identical_answers(step))
        pull = weakest(probe, step.batch, same, probe.tolerance)
        row = LAW.not_applicable(IDENTICAL, "no gradient: see GL") if pull is None else probe.vanishes(
            IDENTICAL, pull.size,
            "A pair of two identical answers has a gradient: roles are mixed up, one side is masked or normalised "
            "differently, or another term is in the loss (declare its weight, Setting(value, \"weight\"); where each "
            "answer is weighed by itself, as in SPPO, NCA and BCO, pairwise=False).",
        )  # fmt: skip
        yield LAW.not_declared(IDENTICAL, TERMS) if step.pairwise is None and row.outcome == "fails" else row
    if step.logprobs is None:
        yield LAW.not_declared("the margin", "logprobs=lambda model, batch: (chosen [P], rejected [P])")
    else:
        yield from _margin(probe, pull.part if pull is not None else _remaining(probe))
    yield from _smoothing(probe, pull)


def sides(step: Step) -> list[tuple[str, str]]:
    """Keys of the batch that belong together: by their roles, and by their names."""
    found = [(step.roles[r], step.roles[r.replace("chosen", "rejected")]) for r in step.roles
             if "chosen" in r and r.replace("chosen", "rejected") in step.roles]  # fmt: skip
    named = [(k, k.replace("chosen", "rejected")) for k in step.batch if "chosen" in k]
    return list(dict.fromkeys([*found, *((c, r) for c, r in named if r in step.batch)]))


def swapped(step: Step, batch: Mapping[str, Any]) -> edits.Batch:
    """Chosen and rejected answers exchanged, with their masks and references."""
    other = dict(batch)
    for chosen, rejected in sides(step):
        other[chosen], other[rejected] = batch[rejected], batch[chosen]
    return other | {key: batch[key].flip(1) for key in stacked(step)}


def stacked(step: Step) -> list[str]:
    """The key of a reference that holds both answers of a pair [P, 2]."""
    value = step.value("reference")
    both = value is not None and value.ndim > 1 and tuple(value.shape[:2]) == (step.rows, 2)
    return [step.roles["reference"]] if both else []


def exchanged(step: Step) -> edits.Batch:
    """The answers swapped where they are apart; else the first half of the rows and the second, where libraries put the
    chosen and the rejected ones. Of short and long answers, every far-off policy may prefer the short ones."""
    if {"chosen", "rejected"} <= step.roles.keys() and can_be_swapped(step):
        return swapped(step, step.batch)
    return edits.take_rows(step, torch.arange(step.rows).roll(step.rows // 2))


def can_be_swapped(step: Step) -> bool:
    """Whether everything that belongs to one answer has a counterpart, so that the answers can be swapped."""
    apart = {k for pair in sides(step) for k in pair}
    named = all(k in apart for k in step.batch if "chosen" in k or "rejected" in k)
    return named and {step.roles["chosen"], step.roles["rejected"]} <= apart


def _identical_answers(step: Step) -> edits.Batch:
    """Every rejected answer is replaced by the chosen one, with its masks and reference."""
    same = {rejected: step.batch[chosen] for chosen, rejected in sides(step)}
    return {**step.batch, **same, **{k: step.batch[k][:, :1].expand_as(step.batch[k]).clone() for k in stacked(step)}}


def _remaining(probe: Probe) -> Part:
    """The loss without its declared terms, where anything is left of it."""
    part = Part({**probe.step.terms_off, **probe.step.pure})
    return part if part.gradient(probe, None).norm() > 0 else Part({})


def _margin(probe: Probe, part: Part) -> Rows:
    """Descending the loss must widen the margin; and at the reference every pair has the same weight."""
    step = probe.step
    units = _units(step, torch.stack(tuple(probe.forward(step.logprobs))))
    wider, *others = [probe.pull((now[0] - now[1]).sum(), retain=True) for now in units]
    cosine = widest = -part.gradient(probe, step.batch).cosine(wider)
    measured = f"cosine {beside(cosine, NEAR)} between -∇L and ∇(chosen - rejected)"
    referred = set(REFERENCES) <= step.roles.keys()
    if referred:  # a margin beyond its target (IPO) is legitimately drawn back; at the reference none is
        there = _at_reference(probe, part, [now.detach() for now in units])
        alike = max((-there.cosine(w) for w in (wider, *others)), key=abs)
        widest = max(cosine, alike)
        measured += f", {beside(alike, NEAR)} at the reference" if cosine <= NEAR else ""
    yield probe.descends(
        "descending widens the margin", measured, widest,
        "Training prefers the rejected answers: a sign is lost, or chosen and rejected are swapped.", NEAR,
    )  # fmt: skip
    if referred and (step.pairwise is False or step.value_is_loss is False):
        yield LAW.not_applicable(ALIKE, "pairs weigh differently by declaration")
    elif referred:
        yield LAW.finding(
            ALIKE, f"cosine {abs(alike):.3f} between ∇L and the plain sum over pairs", "1",
            abs(alike) > 1 - max(probe.tolerance, 1e-2),
            "Where the policy equals the reference all margins are 0 and all pairs weigh the same. They do not: the "
            "reference enters with the wrong sign, on the wrong side, or normalised differently; or pairs have weights "
            "of their own: declare them (role weights; value_is_loss=False where the loss makes them under a detach); "
            "or each answer is weighed by itself: pairwise=False.",
        )  # fmt: skip


def _units(step: Step, now: Tensor) -> list[Tensor]:
    """The log-probs of both sides [2, P] as they are, over the answers' lengths (sums) and times them (averages)."""
    masks = [m for side in edits.SIDES if (m := step.value(f"{side}_mask")) is not None]
    counts = torch.stack([m.flatten(1).sum(-1).clamp(min=1) for m in masks]) if len(masks) == 2 else None
    return [now] if counts is None or counts.shape != now.shape else [now, now / counts, now * counts]


def _at_reference(probe: Probe, part: Part, units: list[Tensor]) -> Gradient:
    """∇L where the policy is its own reference, and every pair counts alike. The reference is in the unit of
    ``logprobs``, unless the stored numbers are several times nearer to another one."""
    step = probe.step
    batch = dict(step.batch)
    for role in (r for r in ("weights", "margin") if r in step.roles):
        value: Tensor = batch[step.roles[role]]
        mean = value.float().mean().to(value.dtype).expand_as(value).clone()
        batch[step.roles[role]] = torch.ones_like(value) if role == "weights" else mean
    stored = torch.stack([batch[step.roles[role]].reshape(units[0][0].shape) for role in REFERENCES])
    far = [float((stored / now).log().abs().max()) for now in units]
    nearest = min(range(len(far)), key=far.__getitem__)
    for role, own in zip(REFERENCES, units[nearest if far[nearest] < far[0] / 3 else 0], strict=True):
        old: Tensor = batch[step.roles[role]]
        batch[step.roles[role]] = own.reshape(old.shape).to(old.dtype)
    return part.gradient(probe, batch)


def _smoothing(probe: Probe, pull: RelativeGradient | None) -> Rows:
    """∇L(chosen, rejected; ε) and ∇L(rejected, chosen; 1 - ε) have the same direction: a wrong label is a swapped pair.
    With a target margin the two are not equal, but point the same way."""
    step = probe.step
    knob = step.first("smoothing")
    if knob is None or pull is None or not can_be_swapped(step):
        return
    knobs = pull.part.knobs
    try:
        here = probe.gradient(step.batch, {**knobs, knob: 0.1})
        there = probe.gradient(swapped(step, step.batch), {**knobs, knob: 0.9})
    except Exception:
        return  # the step refuses more than half of the labels wrong, as it may
    if not (here.finite() and there.finite() and here.norm() > 0 and there.norm() > 0):
        return
    cosine = here.cosine(there)
    yield probe.descends(
        f"swapped answers at 1 - {knob}",
        f"cosine {beside(cosine, 0.0)} to the answers as they are at {knob} = 0.1", cosine,
        f"{knob} is the share of pairs whose label is wrong, so swapping the answers and the share changes nothing. "
        "Here it reverses the gradient: the smoothed part has a wrong sign, or does not swap the answers.",
    )  # fmt: skip


LAW = Law(
    "PAIR", "pairs", __doc__, check, quick=False, perturbed=True,
    when=lambda step: {"chosen", "rejected"} <= step.roles.keys(),
)  # fmt: skip
