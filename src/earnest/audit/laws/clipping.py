"""LAW, clips: a pessimistic clip at ε is silent only where the ratio has already gone the way that the advantage asks.

ratio in (1-ε, 1+ε)        every token pulls, whatever the sign of its advantage
ratio > 1+ε, A > 0         pulls less than inside (for a hard clip: not at all); likewise ratio < 1-ε, A < 0
ratio > 1+ε, A < 0         still pulls: what became likely and was bad must be able to come back; likewise the other
side
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from earnest.audit.law import Law, not_declared
from earnest.audit.laws.on_policy import HIGH, LOW, last, on_policy, quiet_knobs, whitening
from earnest.audit.probe import Probe
from earnest.audit.verdict import Finding


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    if step.kind != "policy gradient" or step.ratio_role not in step.roles:
        return
    low, high = clip_range(probe)
    if low is None or high is None:
        yield Finding("LAW", "clip", "no knob named like a clip, with a value below 1", "-", "not applicable")
        return
    if step.logprobs is None:
        yield not_declared("LAW", "clip", "logprobs=lambda model, batch: …")
        return
    up, down = 1 + 1.5 * high, max(1 - 1.5 * low, (1 - low) / 2)
    cases = [(1 + high / 2, +1), (1 - low / 2, -1), (up, +1), (down, -1), (up, -1), (down, +1)]
    with probe.kicked():
        how = whitening(probe, on_policy(probe), quiet_knobs(probe))
        if how is not None:  # the sign that a row is given is not the sign that its ratio meets
            yield Finding("LAW", "clip", how, "-", "not applicable")
            return
        pulls = _pulls(probe, cases)
    if pulls is None:
        yield Finding(
            "LAW", "clip", "behaviour has no slope", "-", "not applicable", "The ratio is under a stop-gradient."
        )
        return
    inside, done, undone = min(pulls[:2]), max(pulls[2:4]), min(pulls[4:])
    yield _finding("inside the clip range", inside, "every token pulls", inside > 0.3)
    yield _finding("outside, already done", done, "pulls less than inside", done < 0.7)
    yield _finding("outside, to be undone", undone, "pulls", undone > 0.1)


def _finding(subject: str, measured: float, expected: str, holds: bool) -> Finding:
    return LAW.finding(
        f"clip: {subject}",
        f"pull {measured:.2g} of the usual",
        expected,
        holds,
        "The clip does not do what a pessimistic clip does: a bound is wrong on one side, minimum and maximum are "
        "swapped, or one of two uses of the setting is ignored.",
    )


def clip_range(probe: Probe) -> tuple[float | None, float | None]:
    """(ε below, ε above), by the usual names of the setting."""
    low = _value(probe, LOW)
    return low, _value(probe, HIGH) or low


def _value(probe: Probe, names: tuple[str, ...]) -> float | None:
    for knob, value in probe.step.knobs.items():
        if last(knob) in names and isinstance(value, float) and 0 < value < 1:
            return value
    return None


def _pulls(probe: Probe, cases: list[tuple[float, int]]) -> list[float] | None:
    """For every (ratio, sign): how hard a row's tokens pull there, against how hard they pull at ratio 1.

    ∂L/∂lp = -∂L/∂(behaviour) wherever the ratio is differentiated, so one slope has every token's own pull.
    """
    step, quiet, base = probe.step, quiet_knobs(probe), on_policy(probe)
    role = step.ratio_role
    behaviour: Tensor = base[step.roles[role]]
    advantages: Tensor = base[step.roles["advantages"]].abs()
    at_one = probe.slope(role, {**base, step.roles["advantages"]: advantages}, quiet)
    if at_one is None or not bool((at_one != 0).any()):
        return None
    rows = len(behaviour)
    found: dict[int, float] = {}
    for start in range(0, len(cases), rows):
        chosen = [(start + r) % len(cases) for r in range(rows)]
        shape = (-1, *[1] * (behaviour.ndim - 1))
        ratio = torch.tensor([cases[c][0] for c in chosen], dtype=behaviour.dtype, device=behaviour.device).reshape(
            shape
        )
        sign = torch.tensor([cases[c][1] for c in chosen], dtype=advantages.dtype, device=advantages.device)
        moved = behaviour - ratio.log()
        possible = moved < -1e-6  # a log-prob cannot be above 0: such tokens are left out
        # The sampler's log-probs go with the trainer's, so that the gap between the two stays 0.
        both = [step.roles[r] for r in ("behaviour", "proximal") if r in step.roles]
        batch = {
            **base,
            **dict.fromkeys(both, torch.where(possible, moved, behaviour)),
            step.roles["advantages"]: advantages * sign.reshape(-1, *[1] * (advantages.ndim - 1)),
        }
        slope = probe.slope(role, batch, quiet)
        assert slope is not None
        for row, case in enumerate(chosen):
            on = possible[row] & (at_one[row] != 0)
            usual = float((at_one[row].abs() * on).sum())
            if usual > 0:
                pull = float((slope[row].abs() * on).sum()) / (usual * cases[case][0])
                found[case] = (
                    min(found.get(case, pull), pull) if case in (0, 1, 4, 5) else max(found.get(case, pull), pull)
                )
    return [found[c] for c in range(len(cases))] if len(found) == len(cases) else None


LAW = Law(
    code="LAW",
    name="clipping",
    sentence="A pessimistic clip is silent only where the ratio has already gone the way that the advantage asks.",
    needs="a knob named like a clip, with a value below 1; roles behaviour and advantages; logprobs=fn",
    how="Rows are put at ratios inside and outside the range; each token's own pull is the loss's slope by its "
    "behaviour.",
    traps="Soft clips (SAPO) and one-sided ones (CISPO) have settings of other names and are not asked.",
    caught="swapped minimum and maximum, a clip that is obeyed on one side only, TRL #4499",
    check=check,
    quick=False,
)
