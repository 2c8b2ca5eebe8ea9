"""FD: the reported loss's finite difference along a direction agrees with the gradient along it.

(L(θ + εd) - L(θ - εd)) / 2ε  =  ⟨∇L, d⟩
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from earnest.audit import edits
from earnest.audit.law import Law
from earnest.audit.probe import Probe
from earnest.audit.verdict import Finding

TOO_COARSE = 1.0
"""From here on a slope of 0 would be within the room."""


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    if step.value_is_loss is False:
        yield Finding("FD", step.name, "stop-gradients by declaration", "-", "not applicable", "")
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
    # A short step along fp32 offsets is rounded away in a bf16 forward: half a slope is seen there, or twice one.
    room = max(0.75 if probe.coarse else 0.05, 4 * probe.tolerance)
    if room >= TOO_COARSE:
        yield Finding(
            "FD", step.name, f"only within {room:.0%} in this dtype", "-", "not declared",
            "A slope of nothing would pass; audit the step on an fp32 copy of the model to have this checked.",
        )  # fmt: skip
        return
    for kick in (0.05, 0.1, 0.2) if probe.coarse else (0.05,):  # rounding spoils one state, a wrong backward all
        with probe.kicked(kick):
            batch = probe.off_policy()
            gradient = probe.gradient(batch)
            size = gradient.norm()
            if size == 0 or not gradient.finite():
                yield Finding("FD", step.name, f"gradient norm {size:.3g}: GL says so", "-", "not applicable")
                return
            # Along the gradient itself the slope is its norm, the best signal there is against rounding.
            slopes: list[float] = []
            for reach in (1e-3, 1e-2, 1e-4, 3e-5):  # a clip has corners and a sum has rounding: the best length counts
                slopes.append(_slope(probe, batch, gradient.parts, size, reach))
                if abs(slopes[-1] - size) <= room * size:
                    break
        if abs(slopes[-1] - size) <= room * size:
            break
    off = min(abs(s - size) / size for s in slopes)
    yield LAW.finding(
        "loss along its own gradient",
        f"finite difference {min(slopes, key=lambda s: abs(s - size)):.4g}, gradient {size:.4g}",
        f"within {room:.0%}",
        off <= room,
        "The value that is reported is not what the gradient descends: a part of it has no gradient (no_grad, "
        "detach), a backward is hand-written and wrong, or one of them is scaled. Where a factor is detached by design "
        "(DFT, WPO), declare value_is_loss=False.",
    )


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


LAW = Law(
    code="FD",
    name="finite difference",
    sentence="The finite difference of the reported loss agrees with the gradient.",
    needs="value_is_loss=True for policy gradients and self-distillation; SFT, divergences from a role teacher and "
    "preferences are taken to be so",
    how="Central differences along the gradient, from a kicked, off-policy state, at four step lengths, the best "
    "counts (a clip has corners).",
    traps="Fails by design for stop-gradient objectives (REINFORCE surrogates, CISPO, DFT, WPO) and for adapters with "
    "a detached factor (DoRA's norm): they declare value_is_loss=False.",
    caught="SkyRL #1353, TRL #4499, hand-written backwards that are right only for uniform upstream gradients",
    check=check,
    quick=False,
)
