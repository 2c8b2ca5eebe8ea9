"""FD: The finite difference of the reported loss agrees with the gradient.

(L(θ + εd) - L(θ - εd)) / 2ε  =  ⟨∇L, d⟩

Needs: value_is_loss=True for policy gradients and self-distillation; SFT, divergences from a role teacher and
preferences are taken to be so
How: Central differences along the gradient, from a perturbed, off-policy state, at five step lengths; the best one
counts (a clip has corners).
Exceptions: Fails by design for stop-gradient objectives (REINFORCE surrogates, CISPO, DFT, WPO) and for adapters with a
detached factor (DoRA's norm): they declare value_is_loss=False. So may a loss over the student's own top k, which
jumps.
Detects: SkyRL #1353, TRL #4499, hand-written backwards that are right only for uniform upstream gradients
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from earnest_audit import edits
from earnest_audit.law import Law
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.verdict import Finding

ROOM = 0.05
TOO_COARSE = 1.0  # from this tolerance on a slope of 0 would pass
LENGTHS = (1e-3, 1e-2, 1e-4, 3e-5, 1e-5)  # of the parameters' norm: a clip has corners and a sum has rounding


def is_integral(step: Step) -> bool | None:
    """Whether the value is the integral of the gradient; None where that is not known. A divergence whose teacher is no
    input has it made in the step, under a detach as a rule."""
    if step.value_is_loss is not None:
        return step.value_is_loss
    given = step.kind in ("preference", "sft") or (step.kind == "divergence" and "teacher" in step.roles)
    return True if given else None


def check(probe: Probe) -> Iterator[Finding]:
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
    room = ROOM
    if wide is None:
        # A short step along fp32 offsets is rounded away in a bf16 forward: half a slope is seen there, or twice one.
        room = max(0.75 if probe.coarse else ROOM, 4 * probe.tolerance)
        if room >= TOO_COARSE:
            why = "A slope of 0 would pass; audit the step on an fp32 copy of the model to have this checked."
            yield LAW.finding(step.name, f"only within {room:.0%} in this dtype", "-", "not declared", why)
            return
    measured = wide or probe  # whether value and gradient agree does not depend on the precision
    with measured.perturbed():
        size, slope, grain = slopes(measured, measured.off_policy(), room)
    if wide is not None:
        probe.cost += wide.cost
    if size == 0:
        yield LAW.not_applicable(step.name, "no gradient, or none that is finite: see GL")
        return
    off = abs(slope - size)
    if off > room * size and off <= grain:
        why = "The loss's own last bit is larger than what the gradient changes it by: a sum that hides its terms."
        yield LAW.not_applicable("loss along its own gradient", f"the slope is known up to {grain:.2g} only", why)
        return
    yield LAW.finding(
        "loss along its own gradient",
        f"finite difference {slope:.4g}, gradient {size:.4g}" + (", in fp32" if wide is not None else ""),
        f"within {room:.0%}", off <= room * size,
        "The value that is reported is not what the gradient descends: a part of it has no gradient (no_grad, "
        "detach), a backward is hand-written and wrong, or one of them is scaled. Where a factor is detached by design "
        "(DFT, WPO), declare value_is_loss=False.",
    )  # fmt: skip


def _wide(probe: Probe) -> Probe | None:
    """The same step on an fp32 copy of a model of 16 bits; None where it has none, or its loss does not use it."""
    step = probe.step
    if step.precision is not None or all(p.dtype.itemsize >= 4 for p in step.model.parameters()):
        return None  # the loss itself casts
    try:
        model = copy.deepcopy(step.model).float()
        batch = edits.lifted(step.batch, torch.float32)
        twin = Probe(replace(step, model=model, batch=batch, optimizer=None, clipped=None, backward=None, update=None))
        reached = twin.gradient().norm() > 0
    except Exception:
        return None
    return twin if reached and not twin.coarse else None


def slopes(probe: Probe, batch: Mapping[str, Any], room: float) -> tuple[float, float, float]:
    """The gradient's norm (0 where there is none that is finite), the nearest finite difference along it, where the
    signal against rounding is best, and how exact that one is: a loss is rounded to its own last bit."""
    gradient = probe.gradient(batch)
    size = gradient.norm()
    if size == 0 or not gradient.finite():
        return 0.0, 0.0, 0.0
    found: list[tuple[float, float]] = []
    for length in LENGTHS:
        reach, values = probe.reach(length), []
        for sign in (+1, -1):
            with probe.along(gradient, sign * reach):
                values.append(probe.look(dict(batch)).loss)
        grain = 4 * min(probe.coarsest, torch.finfo(torch.float32).eps) * max(map(abs, values)) / (2 * reach)
        found.append(((values[0] - values[1]) / (2 * reach), grain))
        if abs(found[-1][0] - size) <= room * size:
            break
    slope, _ = min(found, key=lambda f: abs(f[0] - size))
    return size, slope, min(grain for _, grain in found)


LAW = Law.of("FD", "finite difference", __doc__, check, quick=False)
