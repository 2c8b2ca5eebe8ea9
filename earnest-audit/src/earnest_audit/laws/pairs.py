"""PAIR: A pair of two identical answers has a zero gradient in one declared part of the loss, descending the loss
widens the margin, a larger target does not weaken a pair, and at the reference every pair has the same weight.

chosen = rejected, token by token   →   gradient 0
lp = reference                      →   every pair has the same weight, towards a wider margin
L = f(β·Δ - γ), γ up                →   a pair's gradient up, or as it was

Needs: roles chosen and rejected, and each answer's masks and references; logprobs=fn for the margin, in the unit that
the loss compares; the weight of any other term in the loss; role margin or a setting of the kind target
How: The rejected answer is replaced by the chosen one; the margin's own gradient is compared; a label smoothing ε is
compared with 1 - ε on swapped answers; one pair gets a larger target.
Exceptions: SPPO, NCA and BCO weigh each answer by itself: pairwise=False. IPO pulls a margin that is beyond its target
back. A reference's unit is read off its numbers: sums or averages.
Warns: (a larger target, where the kind is guessed from the setting's name) other numbers are called gamma or offset.
Detects: sign errors, swapped or differently masked answers, a wrong smoothed half, SimPO's margin added
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.gradient import Gradient
from earnest_audit.law import Law, Rows
from earnest_audit.laws.parts import Part, RelativeGradient, parts, relative, undeclared
from earnest_audit.limits import NEAR, beside
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.verdict import Finding

REFERENCES = ("reference_chosen", "reference_rejected")
TERMS = 'pairwise=True, and settings={name: Setting(value, "weight")} for every term beside the pairs,'
IDENTICAL, ALIKE = "identical pairs", "at the reference every pair has the same weight"


def check(probe: Probe) -> Rows:
    step, part = probe.step, None
    if step.pairwise is False:
        yield LAW.not_applicable(IDENTICAL, "each answer is weighed by itself, by declaration")
    elif step.batch[step.roles["chosen"]].shape != step.batch[step.roles["rejected"]].shape:
        yield LAW.not_applicable(IDENTICAL, "shapes differ", "chosen and rejected are padded differently.")
    else:
        same = probe.kept(IDENTICAL, lambda: _identical_answers(step))
        found = relative(probe, step.batch, same, probe.tolerance)
        part = found[0].part if found else None
        yield _identical(probe, same, found) if found else LAW.not_applicable(IDENTICAL, "no gradient: see GL")
    if step.logprobs is None:
        yield LAW.not_declared("the margin", "logprobs=lambda model, batch: (chosen [P], rejected [P])")
    else:
        rest = part or next(parts(probe))  # the loss without its declared terms, where anything is left of it
        yield from _margin(probe, rest if rest.gradient(probe, None).norm() > 0 else Part({}))
    if part is not None:
        yield from _smoothing(probe, part)
        yield from _target(probe, part)


def _identical(probe: Probe, same: edits.Batch, found: list[RelativeGradient]) -> Finding:
    row = probe.vanishes(
        IDENTICAL, found[0].size,
        f"Two identical answers have a gradient in every part: {', '.join(map(str, found))}. Roles are mixed up, one "
        "side is masked or normalised differently, or another term is in the loss (declare its weight, Setting(value, "
        "\"weight\"); where each answer is weighed by itself, as in SPPO, pairwise=False).",
    )  # fmt: skip
    if row.outcome == "holds":
        return row
    step, known = probe.step, {*probe.step.roles.values(), *probe.step.sides, *probe.step.sides.values()}
    others = [k for k, v in step.batch.items() if k not in known and isinstance(v, Tensor) and v.ndim > 1]
    with probe.may_refuse(IDENTICAL):
        others = [k for k in others if probe.change({**same, k: same[k].flip(0, 1)}, same) > probe.tolerance]
    roles = f'roles={{"chosen_attention": …, "rejected_attention": …}}, or masks, for {", ".join(others)},'
    terms = TERMS if step.pairwise is None else ""
    missing = roles if others else undeclared(probe, step.batch, same, probe.tolerance) or terms
    return LAW.not_declared(IDENTICAL, missing) if missing else row


def swapped(step: Step, batch: Mapping[str, Any]) -> edits.Batch:
    """Chosen and rejected answers exchanged, with their masks and references."""
    other = dict(batch)
    for chosen, rejected in step.sides.items():
        other[chosen], other[rejected] = batch[rejected], batch[chosen]
    return other | {key: batch[key].flip(1) for key in stacked(step)}


def stacked(step: Step) -> list[str]:
    """The key of a reference that holds both answers of a pair [P, 2]."""
    value = step.value("reference")
    return [step.roles["reference"]] if value is not None and value.shape[:2] == (step.rows, 2) else []


def exchanged(step: Step) -> edits.Batch:
    """The answers swapped where they are apart; else the first half of the rows and the second, where libraries put the
    chosen and the rejected ones: every far-off policy may prefer the shorter ones."""
    if {"chosen", "rejected"} <= step.roles.keys() and can_be_swapped(step):
        return swapped(step, step.batch)
    return edits.take_rows(step, torch.arange(step.rows).roll(step.rows // 2))


def can_be_swapped(step: Step) -> bool:
    """Whether everything that belongs to one answer has a counterpart, so that the answers can be swapped."""
    return not step.named_sides[1]


def _identical_answers(step: Step) -> edits.Batch:
    """Every rejected answer is replaced by the chosen one, with its masks and reference."""
    same = {rejected: step.batch[chosen] for chosen, rejected in step.sides.items()}
    return {**step.batch, **same, **{k: step.batch[k][:, :1].expand_as(step.batch[k]).clone() for k in stacked(step)}}


def _margin(probe: Probe, part: Part) -> Rows:
    """Descending the loss must widen the margin; and at the reference every pair has the same weight."""
    step = probe.step
    units = _units(step, torch.stack(tuple(probe.forward(step.logprobs))))
    wider = {unit: probe.pull((now[0] - now[1]).sum(), retain=True) for unit, now in units.items()}
    cosine = widest = -part.gradient(probe, step.batch).cosine(wider[""])
    measured = f"cosine {beside(cosine, NEAR)} between -∇L and ∇(chosen - rejected)"
    referred = set(REFERENCES) <= step.roles.keys()
    if referred:  # a margin beyond its target (IPO) is legitimately drawn back; at the reference none is
        there = _at_reference(probe, part, units)
        alike = {unit: -there.cosine(w) for unit, w in wider.items()}
        widest = max(cosine, alike[""])
        measured += f", {beside(alike[''], NEAR)} at the reference" if cosine <= NEAR else ""
    yield probe.descends(
        "descending widens the margin", measured, widest,
        "Training prefers the rejected answers: a sign is lost, or chosen and rejected are swapped.", NEAR,
    )  # fmt: skip
    if referred and (step.pairwise is False or step.value_is_loss is False):
        yield LAW.not_applicable(ALIKE, "pairs weigh differently by declaration")
    elif referred:
        room = max(probe.tolerance, 1e-2)
        fits = [unit for unit, c in alike.items() if abs(c) >= 1 - room]
        way = f"logprobs= in the unit that the loss compares ({', '.join(fits)})"
        yield LAW.not_declared(ALIKE, way) if fits and "" not in fits else LAW.agrees(
            ALIKE, 1 - abs(alike[""]), room,
            "Pairs of one margin weigh differently: the reference has the wrong sign, side or normaliser; pairs have "
            "weights of their own (declare the role weights, or value_is_loss=False where the loss makes them); or "
            "each answer is weighed by itself (pairwise=False).",
            "cosine 1 - {} between ∇L and the plain sum over pairs",
        )  # fmt: skip


def _units(step: Step, now: Tensor) -> dict[str, Tensor]:
    """The log-probs of both sides [2, P] as they are declared, over the answers' lengths and times them."""
    masks = [m for side in edits.SIDES if (m := step.value(f"{side}_mask")) is not None]
    counts = torch.stack([m.flatten(1).sum(-1).clamp(min=1) for m in masks]) if len(masks) == 2 else None
    if counts is None or counts.shape != now.shape:
        return {"": now}
    return {"": now, "over the lengths": now / counts, "times the lengths": now * counts}


def _at_reference(probe: Probe, part: Part, units: dict[str, Tensor]) -> Gradient:
    """∇L where the policy is its own reference, and every pair counts alike. The reference is in the unit of
    ``logprobs``, unless the stored numbers are several times nearer to another one, which is noted."""
    step, batch = probe.step, dict(probe.step.batch)
    for role in (r for r in ("weights", "margin") if r in step.roles):
        value: Tensor = batch[step.roles[role]]
        batch[step.roles[role]] = torch.full_like(value, float(value.max()))
    stored = torch.stack([batch[step.roles[role]].reshape(units[""][0].shape) for role in REFERENCES])
    far = {unit: float((stored / now.detach()).log().abs().max()) for unit, now in units.items()}
    unit = nearest if far[nearest := min(far, key=far.__getitem__)] < far[""] / 3 else ""
    note = f"guessed from numbers: the references are in the unit of logprobs {unit}"
    probe.notes += (note,) if unit and note not in probe.notes else ()
    for role, own in zip(REFERENCES, units[unit].detach(), strict=True):
        old: Tensor = batch[step.roles[role]]
        batch[step.roles[role]] = own.reshape(old.shape).to(old.dtype)
    return part.gradient(probe, batch)


def _target(probe: Probe, part: Part) -> Rows:
    """One pair alone: gradients of several may cancel. A squared loss past its target pulls back, so a far larger one
    decides. Another number of that name does not strengthen a pair where it is smaller."""
    step, key = probe.step, probe.step.roles.get("margin")
    name = key or step.first("target")
    if name is None or step.rows_interact or not (key or step.knobs[name] > 0) or not probe.afford(4, keep=0.0):
        return
    one, subject = edits.take_rows(step, torch.tensor([0])), f"a larger {name}"

    def pull(more: float) -> float:
        batch = {**one, name: one[name] + more} if key else one
        knobs = part.knobs if key else {**part.knobs, name: step.knobs[name] + more}
        return Part(knobs, part.less).gradient(probe, batch).norm()

    with probe.may_refuse(subject):
        size = float(one[key].abs().max()) + 1 if key else step.knobs[name]
        here, larger, smaller = pull(0.0), max(pull(size), pull(1e3)), pull(-1e3)
    least = here * (1 - max(probe.tolerance, 1e-3))
    judged = not larger < least or least < smaller < math.inf
    LAW.needs(judged, subject, "nor does a smaller one strengthen a pair")
    row = probe.descends(
        subject, f"one pair's gradient is {larger:.3g}, before {here:.3g}", larger,
        f"The chosen answer must win by {name}, so a larger one needs a larger gradient. Here it shrinks: {name} is "
        "added to the margin instead of subtracted.", least,
    )  # fmt: skip
    yield LAW.doubtful(row) if name in step.guesses else row


def _smoothing(probe: Probe, part: Part) -> Rows:
    """∇L(chosen, rejected; ε) and ∇L(rejected, chosen; 1 - ε) point the same way: a wrong label is a swapped pair."""
    step, knob = probe.step, probe.step.first("smoothing")
    if knob is None or not can_be_swapped(step):
        return
    try:
        here = probe.gradient(step.batch, {**part.knobs, knob: 0.1})
        there = probe.gradient(swapped(step, step.batch), {**part.knobs, knob: 0.9})
    except Exception:
        return  # the step refuses more than half of the labels wrong, as it may
    if 0 < here.norm() < math.inf and 0 < there.norm() < math.inf:
        cosine = here.cosine(there)
        yield probe.descends(
            f"swapped answers at 1 - {knob}", f"cosine {beside(cosine, 0.0)} to the answers at {knob} = 0.1", cosine,
            f"{knob} is the share of wrong labels: swapping the answers and the share changes nothing. Here the "
            "gradient is reversed: the smoothed part has a wrong sign, or does not swap the answers.",
        )  # fmt: skip


LAW = Law(
    "PAIR", "pairs", __doc__, check, quick=False, perturbed=True,
    when=lambda step: {"chosen", "rejected"} <= step.roles.keys(),
)  # fmt: skip
