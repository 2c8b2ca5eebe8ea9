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
from collections.abc import Iterator
from dataclasses import replace

import torch

from earnest.audit import edits
from earnest.audit.law import Law
from earnest.audit.probe import Probe
from earnest.audit.verdict import Finding

TOO_COARSE = 1.0
"""From this tolerance on a slope of 0 would pass."""


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    if step.value_is_loss is False:
        yield LAW.not_applicable(step.name, "stop-gradients by declaration")
        return
    # A divergence whose teacher is no input has it made in the step, under a detach as a rule.
    detached = step.kind == "divergence" and "teacher" not in step.roles
    if step.value_is_loss is None and (detached or step.kind in ("policy gradient", None)):
        yield Finding(
            "FD", step.name, "not checked", "-", "not declared",
            "Declare value_is_loss=True where the loss has no stop-gradient by design (ratio forms, SFT, DPO, "
            "divergences from a given teacher), False where it has (REINFORCE, a detached teacher or weight).",
        )  # fmt: skip
        return
    wide = _wide(probe) if probe.coarse else None
    if wide is not None:  # whether value and gradient agree does not depend on the precision
        room = 0.05
        with wide.perturbed():
            found = _nearest(wide, room)
        probe.cost += wide.cost
    else:
        # A short step along fp32 offsets is rounded away in a bf16 forward: half a slope is seen there, or twice one.
        room = max(0.75 if probe.coarse else 0.05, 4 * probe.tolerance)
        if room >= TOO_COARSE:
            yield Finding(
                "FD", step.name, f"only within {room:.0%} in this dtype", "-", "not declared",
                "A slope of 0 would pass; audit the step on an fp32 copy of the model to have this checked.",
            )  # fmt: skip
            return
        with probe.perturbed():
            found = _nearest(probe, room)
    if isinstance(found, str):
        yield LAW.not_applicable(step.name, found)
        return
    slope, size = found
    yield LAW.finding(
        "loss along its own gradient",
        f"finite difference {slope:.4g}, gradient {size:.4g}" + (", in fp32" if wide is not None else ""),
        f"within {room:.0%}",
        _off((slope, size)) <= room,
        "The value that is reported is not what the gradient descends: a part of it has no gradient (no_grad, "
        "detach), a backward is hand-written and wrong, or one of them is scaled. Where a factor is detached by design "
        "(DFT, WPO), declare value_is_loss=False.",
    )


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


def _nearest(probe: Probe, room: float) -> tuple[float, float] | str:
    """The finite difference along the gradient, which has the best signal there is against rounding, and the slope
    that it should be: the gradient's norm. A clip has corners and a sum has rounding: the best length counts."""
    batch = probe.off_policy()
    gradient = probe.gradient(batch)
    size = gradient.norm()
    if size == 0 or not gradient.finite():
        return f"gradient norm {size:.3g}: see GL"
    slopes: list[float] = []
    for reach in (1e-3, 1e-2, 1e-4, 3e-5, 1e-5):
        slopes.append(_slope(probe, batch, gradient.parts, size, reach))
        if _off((slopes[-1], size)) <= room:
            break
    return min(slopes, key=lambda s: abs(s - size)), size


def _off(found: tuple[float, float]) -> float:
    return abs(found[0] - found[1]) / found[1]


def _slope(probe: Probe, batch: edits.Batch, parts: object, size: float, reach: float) -> float:
    assert isinstance(parts, dict)
    total = sum(float(p.detach().double().square().sum()) for p in probe.parameters.values()) ** 0.5
    epsilon = reach * max(total, 1e-2)
    values = []
    for sign in (+1, -1):
        kept = {n: p.detach().clone() for n, p in probe.parameters.items()}
        with torch.no_grad():
            for name, p in probe.parameters.items():
                if parts[name] is not None:
                    p.add_((parts[name].double() * (sign * epsilon / size)).to(p.dtype))
        values.append(probe.look(dict(batch)).loss)
        with torch.no_grad():
            for name, p in probe.parameters.items():
                p.copy_(kept[name])
    return (values[0] - values[1]) / (2 * epsilon)


LAW = Law.of("FD", "finite difference", __doc__, check, quick=False)
