"""LAW, clips: a pessimistic clip at ε is silent only where the ratio has already gone the way that the advantage asks.

ratio in (1-ε, 1+ε)        every token pulls, whatever the sign of its advantage
ratio > 1+ε, A > 0         pulls less than inside (for a hard clip: not at all); likewise ratio < 1-ε, A < 0
ratio > 1+ε, A < 0         still pulls: what became likely and was bad must be able to come back; likewise the other side
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from earnest.audit import edits
from earnest.audit.law import Law
from earnest.audit.laws.on_policy import on_policy, quiet_knobs
from earnest.audit.probe import Probe
from earnest.audit.verdict import Finding

LOW = (
    "clip",
    "clip_low",
    "eps",
    "epsilon",
    "epsilon_low",
    "eps_low",
    "clip_eps",
    "clip_range",
    "cliprange",
    "eps_clip",
    "clip_ratio",
)
HIGH = ("clip_high", "epsilon_high", "eps_high", "cliprange_high", "clip_ratio_high", "eps_clip_high")


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    low, high = clip_range(probe)
    if step.kind != "policy gradient" or step.logprobs is None or "behaviour" not in step.roles:
        return
    if low is None or high is None:
        return
    quiet = quiet_knobs(probe)
    with probe.kicked():
        base = on_policy(probe)
        inside = {
            (s, a): _pull(probe, base, quiet, 1 + s * e / 2, a) for s, e in ((+1, high), (-1, low)) for a in (+1, -1)
        }
        above = {a: _pull(probe, base, quiet, 1 + 1.5 * high, a) for a in (+1, -1)}
        below = {a: _pull(probe, base, quiet, max(1 - 1.5 * low, (1 - low) / 2), a) for a in (+1, -1)}
    typical = max(sum(inside.values()) / 4, 1e-300)
    yield _finding(
        "inside the clip range",
        min(inside.values()) / typical,
        "every token pulls",
        min(inside.values()) > 0.3 * typical,
    )
    worst = max(above[+1], below[-1]) / typical
    yield _finding("outside, already done", worst, "pulls less than inside", worst < 0.7)
    least = min(above[-1], below[+1]) / typical
    yield _finding("outside, to be undone", least, "pulls", least > 0.1)


def _finding(subject: str, measured: float, expected: str, holds: bool) -> Finding:
    return LAW.finding(
        f"clip: {subject}",
        f"pull {measured:.2g} of the usual",
        expected,
        holds,
        "The clip does not do what a pessimistic clip does: a bound is wrong on one side, minimum and maximum are swapped, or one of "
        "two uses of the setting is ignored.",
    )


def clip_range(probe: Probe) -> tuple[float | None, float | None]:
    """(ε below, ε above), by the usual names of the setting."""
    low = _value(probe, LOW)
    return low, _value(probe, HIGH) or low


def _value(probe: Probe, names: tuple[str, ...]) -> float | None:
    for knob, value in probe.step.knobs.items():
        if knob.lower().rsplit(".", 1)[-1] in names and isinstance(value, float) and 0 < value < 1:
            return value
    return None


def _pull(probe: Probe, base: edits.Batch, quiet: Mapping[str, Any], ratio: float, sign: int) -> float:
    """‖∇L‖ over the ratio, with every token at this ratio and every advantage of this sign."""
    step = probe.step
    behaviour, advantages = base[step.roles["behaviour"]], base[step.roles["advantages"]]
    on = edits.fit(edits.supervised(step, base), behaviour)
    moved = behaviour - math.log(ratio)
    # A log-prob cannot be above 0; tokens that are too sure for this ratio are left where they are.
    moved = torch.where(moved < -1e-6, moved, behaviour)
    batch = {
        **base,
        step.roles["behaviour"]: moved if on is None else torch.where(on, moved, behaviour),
        step.roles["advantages"]: sign * advantages.abs(),
    }
    return probe.gradient(batch, quiet).norm() / ratio


LAW = Law(
    code="LAW",
    name="clipping",
    sentence="A pessimistic clip is silent only where the ratio has already gone the way that the advantage asks.",
    needs="a knob named like a clip, with a value below 1; roles behaviour and advantages; logprobs=fn",
    how="All tokens are put at one ratio and one sign, inside and outside the range; the gradient's size is compared.",
    traps="Soft clips (SAPO) and one-sided ones (CISPO) have settings of other names and are not asked.",
    caught="swapped minimum and maximum, a clip that is obeyed on one side only, TRL #4499",
    check=check,
    quick=False,
)
