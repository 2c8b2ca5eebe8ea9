"""LAW, targets: a larger target margin never makes a pair pull less.

L = f(β·Δ - γ) with f' ≤ 0 growing:  γ up  →  -∂L/∂Δ up or as it was
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from earnest.audit import edits
from earnest.audit.law import Law
from earnest.audit.laws.clip_names import last
from earnest.audit.probe import Probe
from earnest.audit.verdict import Finding, unchecked

TARGETS = ("gamma", "simpo_gamma", "gamma_beta_ratio", "margin", "target_margin", "offset")


def check(probe: Probe) -> Iterator[Finding]:
    if {"chosen", "rejected"} <= probe.step.roles.keys():
        with probe.kicked():
            yield from _target(probe)


def _target(probe: Probe) -> Iterator[Finding]:
    """A larger target margin never makes a pair pull less. One pair alone: of several the pulls may cancel. A square
    that is past its target pulls back, less with a larger one, so a far larger one has the last word."""
    step = probe.step
    knob = next((k for k, v in step.knobs.items() if last(k) in TARGETS and isinstance(v, float) and v > 0), None)
    name = step.roles.get("margin", knob)
    if name is None or step.rows_interact:
        return
    if not probe.afford(2, keep=0):
        yield Finding("LAW", f"a larger {name}", "the promised cost is spent", "-", "not applicable")
        return
    try:
        one = edits.take_rows(step, torch.tensor([0]))
    except Exception as error:
        yield unchecked("LAW", f"a larger {name}", error)
        return

    def pull(more: float) -> float:
        if "margin" in step.roles:
            return probe.gradient({**one, name: one[name] + more}).norm()
        return probe.gradient(one, {name: step.knobs[name] + more}).norm()

    there, least = 0.0, 0.0
    try:
        least = pull(0.0) * (1 - max(probe.tolerance, 1e-3))
        for more in (float(one[name].abs().max()) + 1 if "margin" in step.roles else step.knobs[name], 1e3):
            there = pull(more)
            if not there < least:
                break
            if not probe.afford(2, keep=0):
                return
        if not math.isfinite(there) or (there < least and not least < pull(-1e3) < math.inf):
            return  # no target, in spite of its name: a focal exponent, say
    except Exception as error:
        yield unchecked("LAW", f"a larger {name}", error)
        return
    yield LAW.finding(
        f"a larger {name}",
        f"one pair's gradient has norm {there:.3g}",
        f"at least {least:.3g}",
        there >= least,
        f"{name} is what the chosen answer has to win by, so more of it asks for more. Here it asks for less: it is "
        "added to the margin instead of taken off, or has its sign turned.",
    )


LAW = Law(
    code="LAW",
    name="targets",
    sentence="A larger target margin makes no pair pull less.",
    needs="roles chosen and rejected, and the role margin or a knob of such a name (gamma, target_margin, offset)",
    how="One pair alone, with its target and with a larger one.",
    traps="A square that is past its target pulls back, less with a larger one: a far larger one has the last word. A "
    "knob of that name that is no target (a focal exponent) pulls no more at the other end, and is not judged.",
    caught="a reward model's or SimPO's margin that is added instead of taken off",
    check=check,
    quick=False,
)
