"""FD: The finite difference of the reported loss agrees with the gradient, with dropout too.

(L(θ + εd) - L(θ - εd)) / 2ε  =  ⟨∇L, d⟩

Needs: value_is_loss=True for policy gradients and self-distillation; SFT, divergences from a role teacher and
preferences are taken to be so
How: Central differences along the gradient, from a perturbed, off-policy state, at five step lengths; the best one
counts (a clip has corners). Then each declared term by itself, at a thousand times its weight; then with dropout on,
every evaluation from one seed, so that all draw the same masks.
Exceptions: Fails by design for stop-gradient objectives (REINFORCE surrogates, CISPO, DFT, WPO) and for adapters with a
detached factor (DoRA's norm): they declare value_is_loss=False. So may a loss over the student's own top k, which
jumps. A step that is random, or off without dropout too, is not judged with it.
Detects: SkyRL #1353, TRL #4499, hand-written backwards that are right only for uniform upstream gradients, OLMo-core
#828 (checkpointing that draws a new dropout mask)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from earnest_audit import edits
from earnest_audit.gradient import Gradient
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.limits import NEAR, STRONG
from earnest_audit.probe import Probe
from earnest_audit.restore import with_dropout
from earnest_audit.step import Step
from earnest_audit.verdict import Finding

TOO_COARSE = 1.0  # from this tolerance on a slope of 0 would pass
LENGTHS = (1e-3, 1e-2, 1e-4, 3e-5, 1e-5)  # of the parameters' norm: a clip has corners and a sum has rounding
DROPOUT = "loss along its own gradient, dropout on"
MEANING = (
    "The value that is reported is not what the gradient descends: a part of it has no gradient (no_grad, detach), a "
    "backward is hand-written and wrong, or one of them is scaled. Where a factor is detached by design (DFT, WPO), "
    "declare value_is_loss=False."
)


def is_integral(step: Step) -> bool | None:
    """Whether the value is the integral of the gradient; None where that is not known. A divergence whose teacher is no
    input has it made in the step, under a detach as a rule."""
    if step.value_is_loss is not None:
        return step.value_is_loss
    given = step.kind in ("preference", "sft") or (step.kind == "divergence" and "teacher" in step.roles)
    return True if given else None


def check(probe: Probe) -> Rows:
    step = probe.step
    if not is_integral(step):
        yield LAW.not_applicable(step.name, "stop-gradients by declaration") if step.value_is_loss is False else (
            LAW.finding(
                step.name, "not checked", "-", "not declared",
                "Declare value_is_loss=True where the loss has no stop-gradient by design (ratio forms, SFT, DPO, "
                "divergences from a given teacher), False where it has (REINFORCE, a detached teacher or weight).",
            )
        )  # fmt: skip
        return
    wide = _wide(probe) if probe.coarse else None
    room = NEAR
    if wide is None:
        # A short step along fp32 offsets is rounded away in a bf16 forward: half a slope is seen there, or twice one.
        room = max(0.75 if probe.coarse else NEAR, 4 * probe.tolerance)
        if room >= TOO_COARSE:
            why = "A slope of 0 would pass; audit the step on an fp32 copy of the model to have this checked."
            raise Ends(LAW.finding(step.name, f"only within {room:.0%} in this dtype", "-", "not declared", why))
    measured = wide or probe  # whether value and gradient agree does not depend on the precision
    with measured.perturbed():
        batch = measured.off_policy()
        found = slopes(measured, batch, room, measured.gradient(batch))
        if wide is not None:
            probe.cost += wide.cost
        subject = step.name if found[0] == 0 else "loss along its own gradient" + (", in fp32" if wide else "")
        yield judged(LAW, subject, found, room)
        for metric, knob in step.weights.items() if not probe.coarse else ():
            try:
                yield _term(probe, batch, f"term {metric} along its own gradient", knob)
            except Exception:
                continue  # the step refuses such a weight, as it may
    if not probe.coarse:
        yield from _with_dropout(probe)


def _term(probe: Probe, batch: edits.Batch, subject: str, knob: str) -> Finding:
    """The loss with the term a thousand times as heavy, along the term's own gradient. Its slope follows from two
    gradients that law KG has measured, where they are exact enough."""
    weight = float(probe.step.knobs[knob]) or 1.0
    strong, rest = {knob: STRONG * weight}, probe.gradient(batch, {knob: 0.0})
    twice = probe.gradient(batch, {knob: 2 * weight})
    own = twice.minus(rest)
    if probe.tolerance * twice.norm() > NEAR / 4 * own.norm():
        if not probe.afford(2, keep=2):
            return LAW.not_applicable(subject, "not checked: the budget is spent")
        own, whole = probe.gradient(batch, strong).minus(rest), probe.gradient(batch, strong)
    else:
        whole = rest.plus(own, STRONG / 2)
    if not probe.afford(1, keep=2):
        return LAW.not_applicable(subject, "not checked: the budget is spent")
    return judged(LAW, subject, slopes(probe, batch, NEAR, own, whole, strong), NEAR)


def _with_dropout(probe: Probe) -> Rows:
    """A backward that runs a part of the forward again has to draw the same masks."""
    batch = dict(probe.step.batch)  # a copy: readings of the declared one are kept, and have no dropout
    with with_dropout(probe.step.model) as rates:
        if not rates:
            return
        if not probe.afford(5 / 3, keep=0):  # a gradient and two looks
            yield LAW.not_applicable(DROPOUT, "not checked: the budget is spent")
            return
        found = slopes(probe, batch, NEAR, probe.gradient(batch))
    if (off := _off(found)) > NEAR:
        # A step with a detach by design (DoRA's norm) is off without dropout too, and about as much.
        without = _off(slopes(probe, batch, NEAR, probe.gradient(batch)))
        if probe.random() or without > off / 4:
            yield LAW.not_applicable(DROPOUT, "not a matter of dropout", "It is off without, or the step is random.")
            return
    yield judged(
        LAW, DROPOUT, found, NEAR,
        "With dropout on, and only then, the gradient is not that of the loss: activation checkpointing draws another "
        "mask when it runs the forward again (preserve_rng_state=False), or a hand-written backward does.",
    )  # fmt: skip


def _off(found: tuple[float, float, float]) -> float:
    size, slope, _ = found
    return abs(slope - size) / size if size else 0.0


def judged(law: Law, subject: str, found: tuple[float, float, float], room: float, meaning: str = MEANING) -> Finding:
    """The row of one finite difference: the gradient's norm, the slope, and how exact that is."""
    size, slope, grain = found
    if size == 0:
        return law.not_applicable(subject, "no gradient, or none that is finite: see GL")
    off = abs(slope - size)
    if room * abs(size) < off <= grain:
        why = "The loss's own last bit is larger than what the gradient changes it by: a sum that hides its terms."
        return law.not_applicable(subject, f"the slope is known up to {grain:.2g} only", why)
    measured = f"finite difference {slope:.4g}, gradient {size:.4g}"
    return law.finding(subject, measured, f"within {room:.0%}", off <= room * abs(size), meaning)


def _wide(probe: Probe) -> Probe | None:
    """The same step on an fp32 copy of a model of 16 bits; None where it has none, or its loss does not use it."""
    step = probe.step
    if step.precision is not None or all(p.dtype.itemsize >= 4 for p in step.model.parameters()):
        return None  # the loss itself casts
    try:
        twin = probe.twin(torch.float32)
        reached = twin.gradient().norm() > 0
    except Exception:
        return None
    return twin if reached and not twin.coarse else None


def slopes(
    probe: Probe, batch: Mapping[str, Any], room: float, along: Gradient, gradient: Gradient | None = None,
    knobs: Mapping[str, Any] | None = None, lengths: Sequence[float] = LENGTHS,
) -> tuple[float, float, float]:  # fmt: skip
    """The slope along a direction by the gradient (by default: the direction; 0 where there is none that is finite),
    the nearest finite difference, where the signal against rounding is best, and how exact that one is: a loss is
    rounded to its own last bit."""
    if along.norm() == 0 or not along.finite():
        return 0.0, 0.0, 0.0
    size = along.norm() if gradient is None else gradient.dot(along) / along.norm()
    found: list[tuple[float, float]] = []
    for length in lengths:
        reach, values = probe.reach(length), []
        for sign in (+1, -1):
            with probe.along(along, sign * reach):
                values.append(probe.look(dict(batch), knobs).loss)
        grain = 4 * torch.finfo(torch.float32).eps * max(map(abs, values)) / (2 * reach)
        found.append(((values[0] - values[1]) / (2 * reach), grain))
        if abs(found[-1][0] - size) <= room * abs(size):
            break
    slope, _ = min(found, key=lambda f: abs(f[0] - size))
    return size, slope, min(grain for _, grain in found)


LAW = Law("FD", "finite difference", __doc__, check, quick=False)
