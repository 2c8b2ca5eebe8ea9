"""PG-CLIP: Clipping may zero a token's gradient only when its ratio has already moved past the bound in the direction
that its advantage rewards.

ratio in (1-ε, 1+ε)   every token has a gradient, whatever the sign of its advantage
ratio > 1+ε, A > 0    a smaller gradient than inside (a hard clip: 0); likewise ratio < 1-ε, A < 0
ratio > 1+ε, A < 0    a gradient: a token that became likely and was bad must become unlikely; likewise the other side
ratio > 1+ε, A > 0    at every token: a metric of the kind "clipped share" is above 0

Needs: a setting of the kind clip with a value below 1; roles behaviour and advantages (or rewards, one per row);
logprobs=fn
How: Rows are placed at ratios inside and outside the range; a token's own gradient weight is the loss's derivative by
its behaviour and proximal log-probs together. Whose ratio it is, is measured: where one token of a row moves and the
others' weights with it, it is the product over the row. A row's sign is that of its weights at ratio 1.
Exceptions: Not checked where rows interact by declaration (advantages that are whitened have other signs), where
tokens are dropped by declaration (a threshold that removes whole rows), or where rewards contain a KL. Soft clips
(SAPO) and one-sided ones (CISPO) have settings with other names and are not checked.
Detects: minimum and maximum swapped, a clip that acts on one side only, TRL #4499, tianshou #433 (a dual clip on
positive advantages), TRL #3032 (the clipped share of the wrong side)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.laws.ratio import at_one, on_policy, reach, token_weights
from earnest_audit.probe import Probe
from earnest_audit.step import Step

DONE, UNDONE = 0.7, 0.1
INSIDE = 0.3  # of the usual gradient: soft clips fade inside their range, a lost sign or a wrong bound is at 0
MEANING = (
    "Measured is these tokens' gradient relative to the one at ratio 1: the least one, or past the bound that their "
    "advantage rewards the largest. A bound is wrong on one side, or minimum and maximum are swapped; the ratio is of "
    "other log-probs than the declared ones (a temperature, a shift); or advantages are clamped, or one sign is "
    "dropped. (For a threshold that removes whole rows declare drops_tokens=True.)"
)
PRODUCT = 0.75  # the power of one token's ratio in the others' weights: 1 in a product, 1/n in a mean, 0 of tokens


def check(probe: Probe) -> Rows:
    step = probe.step
    ranges = [(step.kinds[n], step.numbers[n]) for n in step.clips if 0 < step.numbers[n] < 1]
    low = next((v for kind, v in ranges if kind == "clip"), None)
    high = next((v for kind, v in ranges if kind == "clip high"), low)
    if not step.knobs:
        raise Ends(LAW.not_declared("clip", 'settings={name: Setting(value, "clip")}, if the loss clips the ratio,'))
    if low is None or high is None:
        raise Ends(LAW.not_applicable("clip", "no setting is a clip with a value below 1"))
    if step.logprobs is None:
        raise Ends(LAW.not_declared("clip", "logprobs=lambda model, batch: …"))
    LAW.needs(not step.rows_interact, "clip", "rows interact by declaration: a row's sign in the loss is not known")
    up, down = 1 + 1.5 * high, max(1 - 1.5 * low, (1 - low) / 2)
    cases = [(1 + high / 2, +1), (1 - low / 2, -1), (up, +1), (down, -1), (up, -1), (down, +1)]
    inside, done, undone = _pulls(probe, cases)
    right = inside > INSIDE and done < DONE and undone > UNDONE
    LAW.needs(right or not step.drops_tokens, "clip", "tokens are dropped by declaration")
    for subject, measured, expected, holds in (
        ("inside the clip range", inside, "every token has a gradient", inside > INSIDE),
        ("outside, already done", done, "a smaller gradient than inside", done < DONE),
        ("outside, to be undone", undone, "a gradient", undone > UNDONE),
    ):
        yield LAW.finding(f"clip: {subject}", f"gradient {measured:.2g} of the usual", expected, holds, MEANING)
    names = [n for n, m in probe.metrics.items() if m.kind == "clipped share"]
    if names and right and "advantages" in step.roles:
        key, base = step.roles["advantages"], on_policy(probe)
        batch, _ = at_ratios(probe, base, [up] * len(base[key]), None)  # lower log-probs are always possible
        shown = probe.look({**batch, key: base[key].abs()}).metrics
        zero = [name for name in names if shown[name] <= 0]
        why = " is 0 where no token has a gradient: it counts another side, or looks at the clipped ratio."
        yield LAW.none("clip: every token's is outside, already done", zero, f"{len(zero)} clipped shares are 0", why)


def _weights(probe: Probe, batch: edits.Batch) -> Tensor | None:
    return token_weights(probe.slopes(edits.SAMPLERS, batch, probe.quiet).inputs)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return like.new_tensor(values).reshape(-1, *[1] * (like.ndim - 1))


def _usual(probe: Probe) -> tuple[edits.Batch, Tensor | None]:
    """A batch at ratio 1, of rows by turns of either sign where advantages are given, and every token's gradient weight
    there; None where only one sign has any."""
    base, found, given = dict(on_policy(probe)), at_one(probe).inputs, probe.step.roles.get("advantages")
    if given is None and (kl := found.get("reference")) is not None and bool((kl != 0).any()):
        raise Ends(LAW.not_applicable("clip", "the rewards contain a KL to the reference, and with it the behaviour"))
    if (usual := token_weights(found)) is None:
        raise Ends(LAW.not_applicable("clip", "the ratio is under a stop-gradient, it has no slope"))
    if given is None:
        return base, usual
    a: Tensor = base[given]
    if not bool((rows := usual.flatten(1).any(-1)).all()):
        other = _weights(probe, {**base, given: -a})
        if other is None or not torch.equal(other.flatten(1).any(-1), rows):
            return base, None
    signs = [1 - 2 * (row % 2) for row in range(len(a))]  # the gradient is linear in the advantages
    return {**base, given: a.abs() * _column(signs, a)}, usual.abs() * _column(signs, usual)


def _is_product(probe: Probe, usual: Tensor) -> bool:
    """Whether the ratio is the product over a row: where the first token of every row moves, inside the range, the
    others' weights change as its ratio does."""
    base, by = on_policy(probe), math.log(reach(probe))
    first = (usual != 0).flatten(1).int().argmax(1, keepdim=True)
    step = torch.zeros_like(usual).flatten(1).scatter(1, first, by).reshape(usual.shape)
    slope = _weights(probe, {**base, **{k: base[k] - step for k in _samplers(probe)}})
    here, there = (0.0 if w is None else float(w[step == 0].abs().sum()) for w in (usual, slope))
    return here > 0 and there > 0 and math.log(there / here) > PRODUCT * by


def _samplers(probe: Probe) -> list[str]:
    return [probe.step.roles[r] for r in edits.SAMPLERS if r in probe.step.roles]


def _pulls(probe: Probe, cases: list[tuple[float, int]]) -> tuple[float, float, float]:
    """Tokens' gradient weights relative to those at ratio 1: the least inside the range, the largest past the bound in
    the rewarded direction, the least past the other bound. By turns, every row is at the ratios of its own sign."""
    base, usual = _usual(probe)
    if usual is None:
        return 0.0, 0.0, 0.0
    product, positive = _is_product(probe, usual), (usual.flatten(1).sum(-1) > 0).tolist()
    own = {up: [c for c, (_, sign) in enumerate(cases) if (sign > 0) == up] for up in (True, False)}
    found: list[list[float]] = [[] for _ in cases]
    for turn in range(3):
        chosen = [own[up][(row + turn) % 3] for row, up in enumerate(positive)]
        batch, possible = at_ratios(probe, base, [cases[c][0] for c in chosen], usual if product else None)
        slope = _weights(probe, batch)
        sign = _column([cases[c][1] for c in chosen], usual)
        asked = possible & (usual * sign > 0)
        sums = [0.0 * usual if w is None else w.abs() * asked for w in (usual, slope)]
        for case, whole, got in zip(chosen, *(w.flatten(1).sum(-1).tolist() for w in sums), strict=True):
            if whole > 0:
                found[case].append(got / (whole * cases[case][0]))
        if all(found):
            break
    inside, done, undone = (found[c] + found[c + 1] for c in (0, 2, 4))
    LAW.needs(inside and done and undone, "clip", "no row has a gradient for every side of the clip")
    return min(inside), max(done), min(undone)


def at_ratios(
    probe: Probe, base: edits.Batch, ratios: list[float], shared: Tensor | None
) -> tuple[edits.Batch, Tensor]:
    """Every row at its ratio (``shared``: the product over the row's tokens that weigh here is), and where that is
    possible: a log-prob cannot be above 0. The sampler's log-probs change with the trainer's, so that the gap between
    the two stays 0."""
    behaviour: Tensor = base[probe.step.roles[probe.step.ratio_role]]
    count = _column([1], behaviour)
    if shared is not None:
        count = _column((shared != 0).reshape(len(shared), -1).sum(-1).clamp(min=1).tolist(), behaviour)
    moved = behaviour - _column(ratios, behaviour).log() / count
    possible = moved < -1e-6
    return {**base, **dict.fromkeys(_samplers(probe), torch.where(possible, moved, behaviour))}, possible


def _judged(step: Step) -> bool:
    returns = "rewards" in step.roles and step.batch[step.roles["rewards"]].ndim > 1  # V-trace's contain later ratios
    return step.kind == "policy gradient" and step.ratio_role in step.roles and not returns


LAW = Law(
    "PG-CLIP", "clipping", __doc__, check, quick=False, perturbed=True, when=_judged,
    asks=(("clip", 'roles={"advantages": …}', lambda step: bool({"advantages", "rewards"} & step.roles.keys())),),
)  # fmt: skip
