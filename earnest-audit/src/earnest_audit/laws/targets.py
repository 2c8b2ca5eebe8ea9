"""PAIR-TARGET: A larger target margin never reduces a pair's gradient.

L = f(β·Δ - γ) with f' ≤ 0 growing:  γ up  →  -∂L/∂Δ up or as it was

Needs: roles chosen and rejected, and the role margin or a setting with such a name (gamma, target_margin, offset)
How: One pair alone, with its target margin and with a larger one.
Exceptions: A squared loss that is past its target pulls back, and less so with a larger target: a far larger one
decides. A setting with such a name that is not a target (a focal exponent) has no larger gradient at the other end, and
is not judged.
Detects: a reward model's or SimPO's margin that is added instead of subtracted
"""

from __future__ import annotations

import math

import torch

from earnest_audit import edits
from earnest_audit.law import Law, Rows
from earnest_audit.probe import Probe
from earnest_audit.step import Step


def target(step: Step) -> str | None:
    """The tensor or the setting that is the margin by which an answer has to win."""
    knob = step.first("target")
    return step.roles.get("margin", knob if knob is not None and step.knobs[knob] > 0 else None)


def check(probe: Probe) -> Rows:
    """One pair alone: gradients of several may cancel. A squared loss past its target pulls back, less so with a larger
    target, so a far larger one decides."""
    name = target(probe.step)
    assert name is not None
    subject = f"a larger {name}"
    with probe.may_refuse(subject):
        found = _norms(probe, name)
    if found is None:
        return
    least, there = found
    yield LAW.finding(
        subject, f"one pair's gradient has norm {there:.3g}", f"at least {least:.3g}", there >= least,
        f"{name} is the margin by which the chosen answer must win, so a larger one needs a larger gradient. Here the "
        "gradient shrinks: it is added to the margin instead of subtracted, or its sign is reversed.",
    )  # fmt: skip


def _norms(probe: Probe, name: str) -> tuple[float, float] | None:
    """The least norm that is expected, and the one with a larger target; None where the name is not a target's."""
    step, given = probe.step, "margin" in probe.step.roles
    one = edits.take_rows(step, torch.tensor([0]))

    def pull(more: float) -> float:
        if given:
            return probe.gradient({**one, name: one[name] + more}).norm()
        return probe.gradient(one, {name: step.knobs[name] + more}).norm()

    there, least = 0.0, pull(0.0) * (1 - max(probe.tolerance, 1e-3))
    for more in (float(one[name].abs().max()) + 1 if given else step.knobs[name], 1e3):
        there = pull(more)
        if not there < least:
            break
        if not probe.afford(2, keep=0):
            return None
    if not math.isfinite(there) or (there < least and not least < pull(-1e3) < math.inf):
        return None  # not a target, in spite of its name: for example a focal exponent
    return least, there


LAW = Law(
    "PAIR-TARGET", "target margins", __doc__, check, quick=False, tier="contrib", perturbed=True, spare=2,
    when=lambda step: {"chosen", "rejected"} <= step.roles.keys() and not step.rows_interact and bool(target(step)),
)  # fmt: skip
