"""PG-RATIO: A token's gradient is proportional to the first power of its importance weight (or independent of it, where
there is none).

behaviour (and proximal) = now - log ρ    ∇L → ρᵏ·∇L, k = 1;  k = 0 without a weight;  k in between where it is tempered
behaviour alone = now - log ρ             the same for proximal / behaviour;  k = 0 where it is over its own mean
k = 2: the weight is applied twice;  k = -1: it is inverted

Needs: roles behaviour (and proximal), advantages or rewards; logprobs=fn(model, batch)
How: All ratios are set to ρ, inside every clip, then the correction's alone; the gradient's power of ρ is measured.
Exceptions: A product over a row has the row's length as its power, and caps or masks that act at ρ do not scale the
gradient as a whole: neither is judged.
Warns: (unless proximal, behaviour and advantages are declared: the ratio is to proximal, behaviour only corrects)
advantages that the loss whitens over the batch (declare rows_interact=True), V-trace, where the returns contain the
ratios of later tokens, and losses with another power of the ratio by design.
Detects: slime #179 (current over rollout), a correction that is inverted or applied twice, CISPO with a squared ratio
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Law, Rows
from earnest_audit.limits import NEAR
from earnest_audit.measure import Reading
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.verdict import Finding

SLACK = 0.3  # soft clips bend the exponent by less; a weight too many or inverted moves it by 1 or 2


def has_ratio(step: Step) -> bool:
    ready = step.kind == "policy gradient" and step.ratio_role in step.roles and step.logprobs is not None
    return ready and bool({"advantages", "rewards"} & step.roles.keys())


def check(probe: Probe) -> Rows:
    roles = probe.step.roles.keys()
    # Doubled advantages share an evaluation with the on-policy law; where rows interact the step may whiten them.
    doubled = "advantages" in roles and not probe.step.rows_interact
    rows = [_power(
        probe, "the ratio's power", shifted(probe, doubled=doubled), 1.0 + doubled,
        "the ratio is applied twice (as a weight and in what is differentiated), or inverted",
    )]  # fmt: skip
    if "proximal" in roles and "rewards" not in roles:
        rows.append(_power(
            probe, "the correction's power", shifted(probe, ("behaviour",)), 1.0,
            "the correction (trainer over sampler) is inverted, or the ratio is already relative to the sampler",
        ))  # fmt: skip
    sure = {"proximal", "behaviour", "advantages"} <= roles and "rewards" not in roles
    yield from rows if sure else map(LAW.doubtful, rows)


def reach(probe: Probe) -> float:
    """ρ: inside half of every declared clip, and as far from 1 as the dtype needs."""
    sizes = [float(probe.step.numbers[k]) for k in probe.step.clips]
    inside = min([v if v < 1 else v - 1 for v in sizes if v > 0 and v != 1], default=1.0)
    return 1 + min(0.15 if probe.coarse else 0.04, 0.5 * inside)


def wider(probe: Probe) -> dict[str, Any]:
    """Every clip that may be any number a quarter wider: without effect at ratio 1, and at ρ."""
    return {knob: probe.step.numbers[knob] * 1.25 for knob in probe.step.clips if knob in probe.step.knobs}


def on_policy(probe: Probe) -> edits.Batch:
    """Behaviour log-probs = the current policy's; advantages of both signs."""
    step = probe.step

    def make() -> edits.Batch:
        batch = probe.as_policy(edits.off_policy(step))
        if "importance" in step.roles:
            batch[step.roles["importance"]] = torch.ones_like(batch[step.roles["importance"]])
        if "advantages" in step.roles and step.rows_interact:  # a step may take their mean off
            a = batch[step.roles["advantages"]]
            batch[step.roles["advantages"]] = a - a.float().mean().to(a.dtype)
        return batch

    return probe.kept("on-policy", make)


def shifted(probe: Probe, roles: Sequence[str] = edits.SAMPLERS, doubled: bool = False) -> edits.Batch:
    """On-policy, and then log-probs lower by log ρ, which is always legal. A KL to the reference inside the rewards
    is kept constant by shifting the reference too."""
    step = probe.step
    if "rewards" in step.roles:
        roles = (*roles, "reference")

    def make() -> edits.Batch:
        batch = dict(on_policy(probe))
        for key in {step.roles[r] for r in roles if r in step.roles}:
            batch[key] = batch[key] - math.log(reach(probe))
        if doubled:
            batch[step.roles["advantages"]] = 2 * batch[step.roles["advantages"]]
        return batch

    return probe.kept(f"shifted {roles} {doubled}", make)


def _power(probe: Probe, subject: str, batch: edits.Batch, factor: float, fault: str) -> Finding:
    knobs = {**probe.quiet, **wider(probe)}
    once, there = policy(probe).gradient.times(factor), probe.gradient(batch, knobs)
    if others(probe) is not None:  # other terms have another power
        there = there.minus(probe.gradient(without_advantages(probe, batch), knobs))
    if once.norm() == 0 or not once.finite():
        return LAW.not_applicable(subject, "no gradient on-policy")
    scale, unit, why = there.best_scale(once), math.log(reach(probe)), ""
    scale = scale if scale > 0 else math.inf  # reversed, or NaN
    rest = there.distance(once.times(scale))
    k, error = math.log(scale) / unit, rest / unit
    if rest > max(NEAR, probe.tolerance):
        why = "Weights of whole sequences, caps and masks do not scale the gradient as a whole: there is no power."
    elif error > 0.5:
        why = "This dtype is too coarse to measure it."
    elif _of_rows(probe, k, error, rest):
        why = "A product over a row has the row's length as its power: a weight of whole sequences."
    elif k > 1 and "advantages" not in probe.step.roles and probe.step.batch[probe.step.roles["rewards"]].ndim > 1:
        why = "Returns that are computed from rewards per token contain the ratios of later tokens (V-trace)."
    if why:
        return LAW.not_applicable(subject, f"k = {k:.2g} ± {error:.2g}", why)
    return LAW.finding(
        subject, f"ratio × {reach(probe):.5g}: gradient × ratio^{k:.2f}",
        f"a power from 0 to 1, up to {SLACK + error:.2g}", -SLACK - error <= k <= 1 + SLACK + error,
        f"The power is {k:.1f} and must be 1 (0 without a weight): {fault}; or the loss whitens its advantages: "
        "declare rows_interact=True.",
    )  # fmt: skip


def _of_rows(probe: Probe, k: float, error: float, rest: float) -> bool:
    """Whether k may be a row's number of supervised tokens. Rows of unequal length then have unequal powers, and are
    not scaled as one."""
    counts = set(edits.taken(probe.step, probe.now()).flatten(1).sum(-1).long().tolist()) - {0, 1}
    if not counts or (len(counts) > 1 and rest <= 4 * probe.tolerance):
        return False
    return min(counts) - SLACK - error <= k <= max(counts) + SLACK + error


def at_one(probe: Probe, advantages: bool = True) -> Reading:
    """The on-policy batch (or that with all advantages 0) with all other terms off, evaluated once for all laws."""
    roles = (*edits.SAMPLERS, "reference") if "rewards" in probe.step.roles else edits.SAMPLERS
    batch = on_policy(probe) if advantages else without_advantages(probe, on_policy(probe))
    return probe.kept(f"slopes at ratio 1, {advantages}", lambda: probe.slopes(roles, batch, probe.quiet))


def without_advantages(probe: Probe, batch: Mapping[str, Any]) -> edits.Batch:
    key = probe.step.roles["advantages"]
    return {**batch, key: torch.zeros_like(batch[key])}


def others(probe: Probe) -> Reading | None:
    """What remains with all advantages 0, if anything: a term that is not declared, or a baseline. Where twice the
    advantages give twice the gradient, nothing remains and no evaluation is needed."""
    step = probe.step
    if "advantages" not in step.roles or (not step.rows_interact and proportion(probe) <= probe.tolerance):
        return None
    rest = at_one(probe, advantages=False)
    return rest if probe.tolerance * at_one(probe).gradient.norm() < rest.gradient.norm() < math.inf else None


def proportion(probe: Probe) -> float:
    """How far twice the advantages, wider clips and ratios of ρ are from twice the gradient, or from 2ρ times it."""
    once, there = at_one(probe).gradient, probe.gradient(shifted(probe, doubled=True), {**probe.quiet, **wider(probe)})
    return min(there.distance(once.times(2.0 * f)) for f in (reach(probe), 1.0))


def policy(probe: Probe) -> Reading:
    """``at_one`` minus what remains at advantages 0: the advantages' part."""
    here, rest = at_one(probe), others(probe)
    if rest is None:
        return here
    slopes = ((role, slope, rest.inputs[role]) for role, slope in here.inputs.items())
    inputs = {role: mine if mine is None or other is None else mine - other for role, mine, other in slopes}
    return Reading(here.loss - rest.loss, here.gradient.minus(rest.gradient), inputs=inputs)


def token_weights(found: Mapping[str, Tensor | None]) -> Tensor | None:
    """-∂L/∂lp per token: lp enters the loss only as a difference to behaviour and proximal log-probs, so the
    derivatives by these two sum to it. One of the two alone contains a correction's part."""
    parts = [g for role in edits.SAMPLERS if (g := found.get(role)) is not None]
    if not parts:
        return None
    total = torch.stack([p.double() for p in parts]).sum(0)
    rounding = max(64 * torch.finfo(p.dtype).eps * float(p.abs().max()) for p in parts)
    return None if float(total.abs().max()) <= rounding else total.to(parts[0].dtype)


LAW = Law("PG-RATIO", "ratio", __doc__, check, quick=False, when=has_ratio, perturbed=True)
