"""PG-CLIP: Clipping may zero a token's gradient only when its ratio has already moved past the bound in the direction
that its advantage rewards.

ratio in (1-ε, 1+ε)   every token has a gradient, whatever the sign of its advantage
ratio > 1+ε, A > 0    a smaller gradient than inside (a hard clip: 0); likewise ratio < 1-ε, A < 0
ratio > 1+ε, A < 0    a gradient: a token that became likely and was bad must become unlikely; likewise the other side
ratio > 1+ε, A > 0    at every token: a metric of the kind "clipped share" is above 0

Needs: a setting of the kind clip with a value below 1; roles behaviour and advantages; logprobs=fn
How: Rows are placed at ratios inside and outside the range; a token's own gradient weight is the loss's derivative by
its behaviour and proximal log-probs together. Where tokens alone do not leave the clip, whole rows do.
Exceptions: Not checked where rows interact by declaration (advantages that are whitened have other signs), or where
tokens are dropped by declaration (a threshold that removes whole rows). Soft clips (SAPO) and one-sided ones (CISPO)
have settings with other names and are not checked.
Detects: minimum and maximum swapped, a clip that acts on one side only, TRL #4499, tianshou #433 (a dual clip on
positive advantages), TRL #3032 (the clipped share of the wrong side)
"""

from __future__ import annotations

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.facts import CLIPS
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.laws.ratio import at_one, on_policy, token_weights
from earnest_audit.probe import Probe

DONE, UNDONE = 0.7, 0.1
INSIDE = 0.3  # of the usual gradient: soft clips fade inside their range, a lost sign or a wrong bound is at 0
MEANING = (
    "This is not how a pessimistic clip acts: a bound is wrong on one side, minimum and maximum are swapped, or one of "
    "two uses of the setting is ignored. (A threshold that removes whole rows has the same effect: declare "
    "drops_tokens=True.)"
)
Pulls = tuple[float, float, float]
"""Gradient weights of tokens relative to those at ratio 1: the least inside the range, the largest where the ratio is
past the bound in the rewarded direction, the least where it is past the other bound."""


def check(probe: Probe) -> Rows:
    step = probe.step
    low, high = clip_range(probe)
    if not step.knobs:
        raise Ends(LAW.not_declared("clip", 'settings={name: Setting(value, "clip")}, if the loss clips the ratio,'))
    if low is None or high is None:
        raise Ends(LAW.not_applicable("clip", "no setting is a clip with a value below 1"))
    if step.logprobs is None:
        raise Ends(LAW.not_declared("clip", "logprobs=lambda model, batch: …"))
    if step.rows_interact:
        raise Ends(LAW.not_applicable("clip", "rows interact by declaration: a row's sign in the loss is not known"))
    up, down = 1 + 1.5 * high, max(1 - 1.5 * low, (1 - low) / 2)
    cases = [(1 + high / 2, +1), (1 - low / 2, -1), (up, +1), (down, -1), (up, -1), (down, +1)]
    pulls = _pulls(probe, cases, rows=False)
    if not _right(pulls) and _right(again := _pulls(probe, cases, rows=True)):
        pulls = again
    if step.drops_tokens and not _right(pulls):
        raise Ends(LAW.not_applicable("clip", "tokens are dropped by declaration"))
    inside, done, undone = pulls
    for subject, measured, expected, holds in (
        ("inside the clip range", inside, "every token has a gradient", inside > INSIDE),
        ("outside, already done", done, "a smaller gradient than inside", done < DONE),
        ("outside, to be undone", undone, "a gradient", undone > UNDONE),
    ):
        yield LAW.finding(f"clip: {subject}", f"gradient {measured:.2g} of the usual", expected, holds, MEANING)
    if (names := [name for name, m in probe.metrics.items() if m.kind == "clipped share"]) and _right(pulls):
        key, base = step.roles["advantages"], on_policy(probe)
        batch, _ = _at_ratios(probe, base, [up] * len(base[key]), None)  # lower log-probs are always possible
        shown = probe.look({**batch, key: base[key].abs()}).metrics
        zero = [name for name in names if shown[name] <= 0]
        why = " is 0 where no token has a gradient: it counts another side, or looks at the clipped ratio."
        yield LAW.none("clip: every token's is outside, already done", zero, f"{len(zero)} clipped shares are 0", why)


def _right(pulls: Pulls) -> bool:
    return pulls[0] > INSIDE and pulls[1] < DONE and pulls[2] > UNDONE


def clip_range(probe: Probe) -> tuple[float | None, float | None]:
    """(ε below, ε above)."""
    step = probe.step
    inside = [(kind, step.knobs[n]) for n, kind in step.kinds.items() if kind in CLIPS and 0 < step.knobs[n] < 1]
    low, high = (next((v for k, v in inside if k == kind), None) for kind in ("clip", "clip high"))
    return low, high or low


def _pulls(probe: Probe, cases: list[tuple[float, int]], rows: bool) -> Pulls:
    """Every row at the ratio and with the sign of a case, by turns. ``rows``: the ratio is a product over a row, and
    every token gets its share."""
    step, base = probe.step, dict(on_policy(probe))
    key = step.roles["advantages"]
    a: Tensor = base[key]
    base[key] = a.abs()
    usual = token_weights(at_one(probe).inputs)
    if usual is None:
        raise Ends(LAW.not_applicable("clip", "the ratio is under a stop-gradient, it has no slope"))
    if not bool(usual.flatten(1).any(-1).all()):  # linear in the advantages, unless one sign has no gradient
        usual = token_weights(probe.slopes(edits.SAMPLERS, base, probe.quiet).inputs)
        if usual is None:
            return 0.0, 0.0, 0.0
    found: dict[int, float] = {}
    for start in range(0, len(cases), len(a)):
        chosen = [(start + row) % len(cases) for row in range(len(a))]
        batch, possible = _at_ratios(probe, base, [cases[c][0] for c in chosen], usual if rows else None)
        sign = torch.tensor([cases[c][1] for c in chosen], dtype=a.dtype, device=a.device)
        batch[key] = a.abs() * sign.reshape(-1, *[1] * (a.ndim - 1))
        slope = token_weights(probe.slopes(edits.SAMPLERS, batch, probe.quiet).inputs)
        slope = torch.zeros_like(usual) if slope is None else slope
        for row, case in enumerate(chosen):
            on = possible[row] & (usual[row] != 0)
            whole = float((usual[row].abs() * on).sum())
            if whole > 0:
                got = float((slope[row].abs() * on).sum()) / (whole * cases[case][0])
                found[case] = (max if case in (2, 3) else min)(found.get(case, got), got)
    if len(found) < len(cases):
        raise Ends(LAW.not_applicable("clip", "no row has a gradient for every side of the clip"))
    return min(found[0], found[1]), max(found[2], found[3]), min(found[4], found[5])


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
    logs = torch.tensor(ratios, dtype=behaviour.dtype, device=behaviour.device).reshape(shape).log()
    moved = behaviour - logs / count
    possible = moved < -1e-6
    both = [step.roles[r] for r in edits.SAMPLERS if r in step.roles]
    return {**base, **dict.fromkeys(both, torch.where(possible, moved, behaviour))}, possible


LAW = Law(
    "PG-CLIP", "clipping", __doc__, check, quick=False, perturbed=True,
    when=lambda step: step.kind == "policy gradient" and step.ratio_role in step.roles and "rewards" not in step.roles,
    asks=(("clip", 'roles={"advantages": …}', lambda step: "advantages" in step.roles),),
)  # fmt: skip
