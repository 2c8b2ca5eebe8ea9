"""PG-CLIP: Clipping may zero a token's gradient only when its ratio has already moved past the bound in the direction
that its advantage rewards.

ratio in (1-ε, 1+ε)   every token has a gradient, whatever the sign of its advantage
ratio > 1+ε, A > 0    a smaller gradient than inside (a hard clip: 0); likewise ratio < 1-ε, A < 0
ratio > 1+ε, A < 0    a gradient: a token that became likely and was bad must become unlikely; likewise the other side

Needs: a setting of the kind clip with a value below 1; roles behaviour and advantages (or rewards); logprobs=fn
How: Rows are placed at ratios inside and outside the range; a token's own gradient weight is the loss's derivative by
its behaviour and proximal log-probs together. Where the step computes its own advantages, their signs are measured at
ratio 1.
Exceptions: A threshold that removes whole rows is searched among the declared settings. Soft clips (SAPO) and one-sided
ones (CISPO) have settings with other names and are not checked.
Detects: minimum and maximum swapped, a clip that acts on one side only, TRL #4499, tianshou #433 (a dual clip on
positive advantages)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.facts import CLIPS
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.laws.ratio import at_one, on_policy, token_weights, whitening
from earnest_audit.probe import Probe

DONE, UNDONE = 0.7, 0.1
INSIDE = 0.3  # of the usual gradient: soft clips fade inside their range, a lost sign or a wrong bound is at 0
Case = tuple[float, int]
MEANING = (
    "This is not how a pessimistic clip acts: a bound is wrong on one side, minimum and maximum are swapped, or one of "
    "two uses of the setting is ignored. (A threshold that removes whole rows has the same effect: declare it in "
    "settings.)"
)


def check(probe: Probe) -> Rows:
    step = probe.step
    low, high = clip_range(probe)
    if not step.knobs:
        raise Ends(LAW.not_declared("clip", 'settings={name: Setting(value, "clip")}, if the loss clips the ratio,'))
    if low is None or high is None:
        raise Ends(LAW.not_applicable("clip", "no setting is a clip with a value below 1"))
    if step.logprobs is None:
        raise Ends(LAW.not_declared("clip", "logprobs=lambda model, batch: …"))
    up, down = 1 + 1.5 * high, max(1 - 1.5 * low, (1 - low) / 2)
    cases = [(1 + high / 2, +1), (1 - low / 2, -1), (up, +1), (down, -1), (up, -1), (down, +1)]
    # Where the step whitens, the sign of a row's advantage in the loss differs from the given one.
    how = whitening(probe) if "advantages" in step.roles else None
    pulls = how if how is not None else _pulls(probe, cases, step.terms_off)
    if isinstance(pulls, str):
        raise Ends(LAW.not_applicable("clip", pulls))
    if not _right(pulls):
        again = _pulls(probe, cases, step.terms_off, rows=True)
        pulls = again if not isinstance(again, str) and _right(again) else pulls
    if step.drops_tokens and not _right(pulls):
        raise Ends(LAW.not_applicable("clip", "tokens are dropped by declaration"))
    inside, done, undone = pulls
    if (inside <= INSIDE or undone <= UNDONE) and (other := _other_threshold(probe, cases)) is not None:
        why = f"{other} removes tokens here, and not the clip."
        raise Ends(LAW.not_applicable("clip", f"no gradient inside its range, unless {other} is far away", why))
    for subject, measured, expected, holds in (
        ("inside the clip range", inside, "every token has a gradient", inside > INSIDE),
        ("outside, already done", done, "a smaller gradient than inside", done < DONE),
        ("outside, to be undone", undone, "a gradient", undone > UNDONE),
    ):
        yield LAW.finding(f"clip: {subject}", f"gradient {measured:.2g} of the usual", expected, holds, MEANING)


def _right(pulls: tuple[float, float, float]) -> bool:
    return pulls[0] > INSIDE and pulls[1] < DONE and pulls[2] > UNDONE


def _other_threshold(probe: Probe, cases: list[Case]) -> str | None:
    """Another setting that has no effect at ratio 1 and restores the gradient when it is far away: for example a
    threshold on the distance to the sampler."""
    step, quiet = probe.step, probe.step.terms_off
    for knob, value in step.knobs.items():
        known = knob in quiet or step.kinds.get(knob) in ("clip", "clip high") or isinstance(value, bool)
        if known or not isinstance(value, int | float) or not value or not probe.afford(3, keep=0):
            continue
        far = {**quiet, knob: value * 1000}
        if at_one(probe).gradient.distance(probe.gradient(on_policy(probe), far)) > probe.tolerance:
            continue
        again = _pulls(probe, cases, far)
        if not isinstance(again, str) and again[0] > INSIDE and again[2] > UNDONE:
            return f"{knob}={value:g}"
    return None


def clip_range(probe: Probe) -> tuple[float | None, float | None]:
    """(ε below, ε above)."""
    step = probe.step
    inside = [(kind, step.knobs[n]) for n, kind in step.kinds.items() if kind in CLIPS and 0 < step.knobs[n] < 1]
    low, high = (next((v for k, v in inside if k == kind), None) for kind in ("clip", "clip high"))
    return low, high or low


def _pulls(
    probe: Probe, cases: list[Case], knobs: Mapping[str, Any], rows: bool = False
) -> tuple[float, float, float] | str:
    """Per-token gradient weights relative to those at ratio 1: the least inside the range, the largest where the ratio
    is past the bound in the rewarded direction, the least where it is past the other bound. Or why they cannot be
    measured. ``rows``: the ratio is a product over a row, and every token gets its share."""
    step, base = probe.step, dict(on_policy(probe))
    ours, here = "advantages" in step.roles, at_one(probe).inputs
    usual, reference = token_weights(here), here.get("reference")
    if ours:
        a: Tensor = base[step.roles["advantages"]]
        base[step.roles["advantages"]] = a.abs()
        if usual is not None:
            usual = usual.abs()  # linear in the advantages (its own law), unless one sign has a zero gradient
            on = edits.fit(edits.supervised(step), usual)
            asked = (a != 0).reshape(len(a), -1).any(-1) & (True if on is None else on.flatten(1).any(-1))
            if bool((usual != 0).any()) and not bool(usual.flatten(1).any(-1)[asked].all()):
                usual = token_weights(probe.slopes(edits.SAMPLERS, base, knobs).inputs)
                if usual is None or not bool((usual != 0).any()):
                    return 0.0, 0.0, 0.0  # negative advantages alone have a gradient at ratio 1
    if usual is None or not bool((usual != 0).any()):
        return "the ratio is under a stop-gradient, it has no slope"
    if reference is not None and bool((reference != 0).any()):
        return "the rewards contain a KL to the reference, and with it the behaviour"
    found: dict[int, float] = {}
    for chosen, sign in _given_signs(probe, cases, base) if ours else _own_signs(cases, usual, found):
        batch, possible = _at_ratios(probe, base, [cases[c][0] for c in chosen], usual if rows else None)
        if sign is not None:
            a = base[step.roles["advantages"]]
            batch[step.roles["advantages"]] = a * sign.reshape(-1, *[1] * (a.ndim - 1))
        slope = token_weights(probe.slopes(edits.SAMPLERS, batch, knobs).inputs)
        slope = torch.zeros_like(usual) if slope is None else slope
        for row, case in enumerate(chosen):
            # In a row with both signs, only the tokens of the case's sign.
            on = possible[row] & ((usual[row] != 0) if sign is not None else usual[row] * cases[case][1] > 0)
            whole = float((usual[row].abs() * on).sum())
            if whole > 0:
                got = float((slope[row].abs() * on).sum()) / (whole * cases[case][0])
                found[case] = (max if case in (2, 3) else min)(found.get(case, got), got)
    pairs = [[found[c] for c in pair if c in found] for pair in ((0, 1), (2, 3), (4, 5))]
    if not all(pairs) or (ours and len(found) < len(cases)):
        return "no row has a gradient for every side of the clip"
    return min(pairs[0]), max(pairs[1]), min(pairs[2])


def _at_ratios(
    probe: Probe, base: edits.Batch, ratios: list[float], shared: Tensor | None
) -> tuple[edits.Batch, Tensor]:
    """Every row at its ratio (``shared``: the product over the row's tokens that weigh here is), and where that is
    possible: a log-prob cannot be above 0. The sampler's log-probs change with the trainer's, so that the gap between
    the two stays 0."""
    step = probe.step
    behaviour: Tensor = base[step.roles[step.ratio_role]]
    shape = (-1, *[1] * (behaviour.ndim - 1))
    count = 1 if shared is None else (shared != 0).reshape(len(shared), -1).sum(-1).clamp(min=1).reshape(shape)
    moved = (
        behaviour - torch.tensor(ratios, dtype=behaviour.dtype, device=behaviour.device).reshape(shape).log() / count
    )
    possible = moved < -1e-6
    both = [step.roles[r] for r in edits.SAMPLERS if r in step.roles]
    return {**base, **dict.fromkeys(both, torch.where(possible, moved, behaviour))}, possible


def _given_signs(probe: Probe, cases: list[Case], base: edits.Batch) -> Iterator[tuple[list[int], Tensor | None]]:
    """A case for every row, and the sign of its advantage in that case."""
    step = probe.step
    rows, a = len(base[step.roles[step.ratio_role]]), base[step.roles["advantages"]]
    for start in range(0, len(cases), rows):
        chosen = [(start + r) % len(cases) for r in range(rows)]
        yield chosen, torch.tensor([cases[c][1] for c in chosen], dtype=a.dtype, device=a.device)


def _own_signs(cases: list[Case], pulls: Tensor, found: dict[int, float]) -> Iterator[tuple[list[int], Tensor | None]]:
    """The step computes its advantages: their signs are those of the gradient weights at ratio 1. Each row gets a case
    of its sign, in turns until all are ``found`` or every row has had each."""
    signs = [+1 if total > 0 else -1 for total in pulls.flatten(1).sum(-1).tolist()]
    by_sign = {sign: [c for c, case in enumerate(cases) if case[1] == sign] for sign in (+1, -1)}
    before = [signs[:row].count(sign) for row, sign in enumerate(signs)]
    for turn in range(3):
        if len(found) < len(cases):
            yield [by_sign[sign][(n + turn) % 3] for sign, n in zip(signs, before, strict=True)], None


LAW = Law(
    "PG-CLIP", "clipping", __doc__, check, quick=False, perturbed=True,
    when=lambda step: step.kind == "policy gradient" and step.ratio_role in step.roles,
    asks=(
        ("clip", 'roles={"advantages": …} (or "rewards")',
         lambda step: bool({"advantages", "rewards"} & step.roles.keys())),
    ),
)  # fmt: skip
