"""PAIR: A pair of two identical answers has a zero gradient, descending the loss widens the margin, and at the
reference every pair has the same weight.

chosen = rejected, token by token   →   gradient 0
lp = reference                      →   every pair has the same weight, towards a wider margin

Needs: roles chosen and rejected; logprobs=fn for the margin; the weight of any other term in the loss
How: The rejected answer is replaced by the chosen one; the margin's own gradient is compared; a label smoothing ε is
compared with 1 - ε on swapped answers.
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
from earnest_audit.laws.parts import Part, RelativeGradient, mixer, undeclared_weight, weakest
from earnest_audit.limits import NEAR, beside
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.verdict import Finding

REFERENCES = ("reference_chosen", "reference_rejected")
BOTH = "both answers"
IDENTICAL, ALIKE = "identical pairs", "at the reference every pair has the same weight"


def check(probe: Probe) -> Rows:
    step, pull = probe.step, None
    if not step.pairwise:
        yield LAW.not_applicable(IDENTICAL, "each answer is weighed by itself, by declaration")
    elif step.batch[step.roles["chosen"]].shape != step.batch[step.roles["rejected"]].shape:
        yield LAW.not_applicable(IDENTICAL, "shapes differ", "chosen and rejected are padded differently.")
    else:
        same = probe.kept_batch(IDENTICAL, lambda: _identical_answers(step))
        pull = weakest(probe, step.batch, same, probe.tolerance)
        yield _identical(probe, pull, same)
    if step.logprobs is None:
        yield LAW.not_declared("the margin", "logprobs=lambda model, batch: (chosen [P], rejected [P])")
    else:
        yield from _margin(probe, pull.part if pull is not None else _remaining(probe))
    yield from _smoothing(probe, pull)
    yield from _rest(probe, pull)


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
    part = Part("the loss without its other terms", {**probe.step.terms_off, **probe.step.pure})
    return part if part.gradient(probe, None).norm() > 0 else Part("the loss", {})


def _identical(probe: Probe, pull: RelativeGradient | None, same: edits.Batch) -> Finding:
    if pull is None:
        return LAW.not_applicable(IDENTICAL, "no gradient: see GL")
    why: str | None = None
    if pull.size > probe.tolerance:
        if _by_itself(probe, pull.part):
            why = (
                "The same constant on both reference log-probs changes the gradient: each answer is weighed by itself. "
                "Where that is intended (SPPO, NCA, BCO), declare pairwise=False."
            )
        elif mixing := mixer(probe, pull.part, probe.step.batch, same, probe.tolerance):
            knob, end = mixing
            why = f"At {knob} = {end:g} nothing is left: {knob} weighs another term. Declare {_as_weight(probe, knob)}."
        elif weight := undeclared_weight(probe, pull.part, probe.step.batch, same):
            why = f"{weight} has no effect on such a pair: it weighs the preference. Declare Metric(weight={weight!r})."
    if why is not None:
        return LAW.finding(IDENTICAL, f"gradient {pull.size:.2g} of the usual", "0", "not declared", why)
    return probe.vanishes(
        IDENTICAL, pull.size,
        "A pair of two identical answers has a gradient: roles are mixed up, one side is "
        "masked or normalised differently, or another term is in the loss (declare its weight, Setting(value, "
        "\"weight\"); where each answer is weighed by itself, pairwise=False).",
    )  # fmt: skip


def _as_weight(probe: Probe, knob: str) -> str:
    return f'settings={{"{knob}": Setting({probe.step.knobs[knob]!r}, "weight")}}'


def _by_itself(probe: Probe, part: Part) -> bool:
    """Whether both references together matter: in a margin their common part cancels."""
    step = probe.step
    if not set(REFERENCES) <= step.roles.keys():
        return False
    keys = [step.roles[r] for r in REFERENCES]
    # Another amount for each pair: a batch's mean may be taken off.
    size = max(float(step.batch[k].float().abs().mean()) for k in keys) / 2
    shift = size * torch.rand(step.batch[keys[0]].shape, generator=edits.generator(step, 31))
    moved = {**step.batch, **{k: step.batch[k] - shift.to(step.batch[k].device, step.batch[k].dtype) for k in keys}}
    # Rounding: a shift that cancels exactly still moves fp32 margins by eps times their parts.
    together = part.gradient(probe, step.batch).distance(part.gradient(probe, moved)) > max(1e-3, probe.tolerance)
    return together and _pushes_down(probe, part)


def _pushes_down(probe: Probe, part: Part) -> bool:
    """Whether the rejected answers lose at the reference: with a sign that is lost both answers matter together, too,
    and the rejected ones are pushed up. (∂L/∂lp = -∂L/∂reference.)"""
    step = probe.step
    if step.logprobs is None or part.less is not None:
        return True
    batch = {**step.batch, **_as_reference(step, _now(probe))}
    slope = probe.slopes(["reference_rejected"], batch, part.knobs).inputs.get("reference_rejected")
    return slope is None or float(slope.sum()) <= 0


def _margin(probe: Probe, part: Part) -> Rows:
    """Descending the loss must widen the margin; and at the reference every pair has the same weight."""
    step = probe.step
    chosen, rejected = probe.forward(step.logprobs)
    probe.kept_batch(BOTH, lambda: {"now": (chosen.detach(), rejected.detach())})
    wider = probe.pull((chosen - rejected).sum())
    cosine = -part.gradient(probe, step.batch).cosine(wider)
    referred = set(REFERENCES) <= step.roles.keys()
    alike = there = _at_reference(probe, part, wider) if referred else 0.0
    enough, why = 1 - max(probe.tolerance, 1e-2), None
    measured = f"cosine {beside(cosine, NEAR)} between -∇L and ∇(chosen - rejected)"
    # a margin beyond its target (IPO) is legitimately drawn back; at the reference none is
    if referred and cosine <= NEAR:
        measured += f", {beside(-there, NEAR)} at the reference"
    yield probe.descends(
        "descending widens the margin", measured, max(cosine, -there),
        "Training prefers the rejected answers: a sign is lost, or chosen and rejected are swapped.", NEAR,
    )  # fmt: skip
    if not referred:
        return
    if not step.pairwise or step.value_is_loss is False:
        yield LAW.not_applicable(ALIKE, "pairs weigh differently by declaration")
        return
    if abs(alike) <= enough and _by_itself(probe, part):
        why = "Each answer is weighed by itself against the reference: where intended, declare pairwise=False."
    yield LAW.finding(
        ALIKE, f"cosine {abs(alike):.3f} between ∇L and the plain sum over pairs", "1",
        "not declared" if why else abs(alike) > enough, why or
        "Where the policy equals the reference all margins are 0 and all pairs weigh the same. They do not: the "
        "reference enters with the wrong sign, on the wrong side, or normalised differently; or pairs have weights of "
        "their own: declare them (role weights; value_is_loss=False where the loss makes them under a detach).",
    )  # fmt: skip


def _at_reference(probe: Probe, part: Part, wider: Gradient) -> float:
    """The cosine between ∇L and the margins' gradient where the policy is its own reference, and every pair counts
    alike."""
    step = probe.step
    ones: edits.Batch = {}
    for role in (r for r in ("weights", "margin") if r in step.roles):
        value: Tensor = step.batch[step.roles[role]]
        mean = value.float().mean().to(value.dtype).expand_as(value).clone()
        ones[step.roles[role]] = torch.ones_like(value) if role == "weights" else mean
    return part.gradient(probe, {**step.batch, **ones, **_as_reference(step, _now(probe))}).cosine(wider)


def _now(probe: Probe) -> list[Tensor]:
    """The policy's log-probs of both answers."""
    both = probe.kept_batch(BOTH, lambda: {"now": probe.forward(probe.step.logprobs, graph=False)})
    return [side.detach() for side in both["now"]]


def _as_reference(step: Step, values: list[Tensor]) -> edits.Batch:
    """These values as the references, in their shape and dtype."""
    keys = [step.roles[r] for r in REFERENCES]
    return {k: v.reshape(step.batch[k].shape).to(step.batch[k].dtype) for k, v in zip(keys, values, strict=True)}


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


def _rest(probe: Probe, pull: RelativeGradient | None) -> Rows:
    """What remains beside the preference (a likelihood) also changes when the answers are swapped."""
    step, quiet = probe.step, {**probe.step.terms_off, **probe.step.pure}
    if pull is None or pull.part.less is None or not can_be_swapped(step) or not probe.afford(1):
        return
    here, there = probe.gradient(step.batch, quiet), probe.gradient(swapped(step, step.batch), quiet)
    if here.norm() == 0 or not there.finite():
        return
    off = here.distance(there)
    yield LAW.finding(
        "the loss without its preference, answers swapped", f"moved the gradient by {off:.2g}",
        f"above {probe.tolerance:.1g}", off > probe.tolerance,
        "Beside the preference there is a part that treats both answers alike, so the rejected ones are trained like "
        "the chosen ones: a likelihood over all rows instead of the chosen half. Where that is intended, declare its "
        "weight: Setting(value, \"weight\").",
    )  # fmt: skip


LAW = Law(
    "PAIR", "pairs", __doc__, check, quick=False, perturbed=True,
    when=lambda step: {"chosen", "rejected"} <= step.roles.keys(),
)  # fmt: skip
