"""PG-REWARD: A better reward makes its row more likely, rewards that are equal within every group give a zero gradient,
and a KL in the reward is a cost.

one row's reward from the worst to the best   -Δ∇L has that row's ∇Σlp in it, with a weight above 0
a row at the reference, not above it          is raised (a KL in the reward is a cost)

Needs: role rewards, where the loss computes its own advantages; logprobs=fn; roles group and reference
How: On-policy, the worst row gets the best reward (or is placed at the reference), and the change of the gradient is
compared with that row's ∇Σlp.
Exceptions: Only reward values that occur are used: some estimators divide by a mean. Where the loss leaves out a row,
the next is tried. With a critic, or a baseline over the batch (rows_interact=True), equal groups may have a gradient.
Detects: a baseline with the wrong sign or from the neighbouring group, a KL that is added to the reward (TRL #463)
"""

from __future__ import annotations

import math

import torch

from earnest_audit import edits
from earnest_audit.gradient import Gradient, span
from earnest_audit.law import Law, Rows
from earnest_audit.laws.ratio import at_one, on_policy
from earnest_audit.limits import NEAR
from earnest_audit.probe import Probe
from earnest_audit.verdict import Finding

ROWS = 3  # so many rows are tried where the loss leaves rows out
BETTER = "a better reward raises its row"


def check(probe: Probe) -> Rows:
    step = probe.step
    rewards = step.batch[step.roles["rewards"]]
    LAW.needs(rewards.ndim == 1 and len(rewards) > 1, "rewards", "not one per row, or of one row")
    for row in _worst(probe):
        scores = _scores(probe, row)
        better = _better(probe, row, scores)
        if better.outcome != "not applicable":
            break
    yield better
    if "reference" in step.roles:
        yield from _reference(probe, row, scores)
    if "group" in step.roles and not step.rows_interact and "values" not in step.roles:
        yield _equal(probe)


def _equal(probe: Probe) -> Finding:
    """Every row of a group gets one reward, groups different ones; what is left where all have one is taken off."""
    base, key = on_policy(probe), probe.step.roles["rewards"]
    _, group = base[probe.step.roles["group"]].reshape(len(base[key]), -1)[:, 0].unique(return_inverse=True)
    same = torch.ones_like(base[key])
    apart = torch.where(group % 2 == 0, 1.0, 0.5 if same.is_floating_point() else 0.0).to(same.dtype)
    one, other = (probe.gradient({**base, key: values}, probe.quiet) for values in (same, apart))
    left = one.minus(other).norm() / max(at_one(probe).gradient.norm(), 1e-300)
    return probe.vanishes(
        "rewards that are equal within every group", left,
        "The baseline is another group's, or the batch's (then declare rows_interact=True), or groups are cut wrongly "
        "(tiled against interleaved).", NEAR,
    )  # fmt: skip


def _better(probe: Probe, row: int, scores: tuple[Gradient, Gradient]) -> Finding:
    """The worst row gets the best reward of the batch: a value that occurs, so that no estimator leaves its range."""
    base, key = on_policy(probe), probe.step.roles["rewards"]
    rewards = base[key].clone()
    rewards[row] = rewards.max() if bool(rewards.max() > rewards[row]) else rewards[row] + 1
    there = probe.gradient({**base, key: rewards}, probe.quiet)
    return _raised(
        probe, BETTER, at_one(probe).gradient, there, scores,
        f"Row {row} gets the best reward, and its tokens become less likely: the advantage's sign is reversed, or "
        "rewards are paired with other rows.",
    )  # fmt: skip


def _reference(probe: Probe, row: int, scores: tuple[Gradient, Gradient]) -> Rows:
    """A KL in the reward is a cost: a row above the reference is worth less than one at the reference."""
    step, quiet = probe.step, probe.quiet
    key, base = step.roles["reference"], on_policy(probe)
    if base[key].shape != probe.now().shape:
        return
    base = probe.as_policy(base, ("reference",))
    above = base[key].clone()
    above[row] -= 1.0
    there, here = probe.gradient({**base, key: above}, quiet), probe.gradient(base, quiet)
    if not probe.is_change(here.distance(there)):
        return  # the reference is in a declared term, which has its own laws
    yield _raised(
        probe, "a row at the reference, not above it", there, here, scores,
        f"Row {row} is worth more away from the reference than at it: the KL in the reward has the wrong sign.",
    )  # fmt: skip


def _raised(
    probe: Probe, subject: str, worse: Gradient, better: Gradient, scores: tuple[Gradient, Gradient], meaning: str
) -> Finding:
    """Of -Δ∇L = α·∇Σlp(row) + β·∇Σlp(the others) + …, α is above 0. It is next to 0 where the loss leaves the row out.
    Rows may be alike, so a failure needs the plain cosine below 0 as well."""
    change = worse.minus(better)
    if not probe.tolerance * max(worse.norm(), better.norm()) < change.norm() < math.inf:
        return LAW.not_applicable(subject, "the gradient stays", "Law IG checks whether it must change.")
    cosine, share = change.cosine(scores[0]), span(change, *scores)
    weight = share.alpha * share.lengths[0]
    measured = f"weight {weight:+.2g} of the row's own ∇Σlp, cosine {cosine:+.2g}"
    if abs(weight) <= NEAR:
        return LAW.not_applicable(subject, measured, "The loss leaves the row out, or gives its reward to another row.")
    return LAW.finding(subject, measured, f"not both below {-NEAR:g}", not (weight < -NEAR and cosine < -NEAR), meaning)


def _worst(probe: Probe) -> list[int]:
    """The rows of the least reward that have supervised tokens, the worst first."""
    step, batch = probe.step, on_policy(probe)
    trained = edits.taken(step, probe.now(), batch).flatten(1).any(-1)
    order = batch[step.roles["rewards"]].float().argsort(stable=True).tolist()
    return [row for row in order if trained[row]][:ROWS] or order[:1]


def _scores(probe: Probe, row: int) -> tuple[Gradient, Gradient]:
    """∇Σlp of the row and of all others."""
    step, batch = probe.step, on_policy(probe)
    now = probe.forward(step.logprobs, batch)
    taken = edits.taken(step, now, batch) * now
    own = taken[row].sum()
    return probe.pull(own, retain=True), probe.pull(taken.sum() - own)


LAW = Law(
    "PG-REWARD", "rewards", __doc__, check, quick=False, perturbed=True,
    when=lambda step: step.kind == "policy gradient" and "rewards" in step.roles,
    asks=((BETTER, "logprobs=lambda model, batch: …", lambda step: step.logprobs is not None),),
)  # fmt: skip
