"""F64: The step's gradient agrees with that of a float64 copy, on confident inputs and large margins too.

Needs: a model that can be deep-copied and a loss that uses the model it is given
How: A copy of the model in float64 runs the same batch: as it is, with outputs so confident that log-probs are at -150
(log-probs of the batch follow), and so large that the farthest pair is far on the wrong side. With log-ratios of single
tokens near 150 and -150 the loss only has to be finite, where this dtype can hold float64's.
Exceptions: Modules that cast to fp32 inside do so in the copy, too. A random step (NEFTune) is not judged.
Warns: (confident outputs and far margins, where at least half of the gradient is left and its direction is kept) a form
that loses digits only there, as 1 - p does for a p next to 1.
Detects: log(sigmoid(x)), sqrt(x + 1e-8) in fp16, sums in bf16, bf16 gates, r/(1 + r) where the ratio r overflows
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Law, Rows
from earnest_audit.laws.finite_difference import float64_copy
from earnest_audit.laws.inputs import far
from earnest_audit.laws.pairs import can_be_swapped, swapped
from earnest_audit.probe import Probe
from earnest_audit.restore import moved, put_back
from earnest_audit.verdict import Finding

SHARPEN = 12.0  # what the last matrix is scaled by, at least
TRIED = 4  # of the last matrices
FAR = 150.0  # nats: a probability that is 0 in fp32 and not in float64
MARGINS = (3e4, 3e3, 3e2)  # for a β of 0.01, 0.1 and 1: 300 of it, where fp32 has no sigmoid left and float64 has
SATURATED = 1e-4  # of the usual gradient: a sigmoid, or a capped loss, that is at its end by design
LOST = 1e-2  # of the gradient: what rounding may change where log-probs or margins are large
SHARE = 0.5  # of the float64 gradient: with less of it far out, training is lost there
ALONG = 0.25  # along the float64 gradient: with less, most of it has another direction
CONFIDENT, FAR_MARGINS = "confident outputs", "far margins"
INFINITE = "the float64 shadow is not finite either"
SPENT = "not checked: the budget is spent"


def check(probe: Probe) -> Rows:
    step = probe.step
    LAW.needs(any(p.dtype != torch.float64 for p in probe.parameters.values()), step.name, "float64 already")
    with probe.perturbed():
        batch = probe.off_policy()
    yield _compare(probe, "the batch", batch)
    looks = step.logprobs is not None or step.student is not None or step.kind == "sft"  # at log-probs, or the loss
    enough = probe.afford(13 / 3 if looks else 8 / 3, keep=0)
    paired = step.kind == "preference" and "chosen" in step.roles
    if not enough or (head := _head(probe)) is None:
        why = "no matrix to scale up" if enough else SPENT
        yield from (LAW.not_applicable(state, why) for state in (CONFIDENT, *([FAR_MARGINS] if paired else [])))
        return
    yield from probe.tried({CONFIDENT: _confident(probe, head)})
    if paired:
        with probe.may_refuse(FAR_MARGINS):
            yield _far_margins(probe, head)


def _confident(probe: Probe, head: Tensor) -> Rows:
    """The last matrix is scaled up until log-probs are at -FAR, or margins at 2·FAR; log-probs of the batch follow the
    policy there, so that no ratio overflows. In 16 bits twelve times, where rounding allows no more."""
    step, factor = probe.step, SHARPEN
    with probe.perturbed():
        batch = dict(probe.off_policy())
        if not probe.coarse:
            with _scaled(head, SHARPEN):
                factor *= min(max(1.0, FAR / max(_farthest(probe), 1e-6)), FAR)
        given = [role for role in ("behaviour", "proximal", "reference") if role in step.roles]
        with _scaled(head, factor):
            now: Any = _logprobs(probe) if given else None
        for role in given:
            old: Tensor = batch[step.roles[role]]
            fits = isinstance(now, Tensor) and now.numel() == old.numel()
            LAW.needs(fits, CONFIDENT, f"the {role}'s log-probs cannot follow: no logprobs, or in another shape")
            less = edits.noise_like(now, edits.generator(step, 83)).abs() * (0.5 if role == "reference" else 0.05)
            batch[step.roles[role]] = (now.detach() - less).clamp(max=-1e-6).reshape(old.shape).to(old.dtype)
    yield _compare(probe, CONFIDENT, batch, head, factor)
    if step.ratio_role in step.roles and probe.afford(4 / 3, keep=0):
        yield _far_ratios(probe, head, factor, batch)


def _logprobs(probe: Probe) -> Any:
    return None if probe.step.logprobs is None else probe.forward(probe.step.logprobs, graph=False)


def _farthest(probe: Probe) -> float:
    """How far from 0 log-probs are (half of it for margins of pairs); FAR where that is not known."""
    step, now = probe.step, _logprobs(probe)
    if isinstance(now, Tensor):
        return -float(now.min())
    if now is not None:
        return float((now[0] - now[1]).abs().max()) / 2
    if step.student is not None and (own := probe.forward(step.student, graph=False)).is_floating_point():
        return -float((own.clamp_min(1e-30).log() if edits.probability_like(own) else own.log_softmax(-1)).min())
    return abs(probe.look(dict(step.batch)).loss) if step.kind == "sft" else FAR


def _far_margins(probe: Probe, head: Tensor) -> Finding:
    """Outputs so large that the farthest pair is far on the wrong side (else swapped), as far as float64 can follow."""
    step = probe.step
    LAW.needs(step.logprobs and can_be_swapped(step), FAR_MARGINS, "no logprobs, or answers cannot be swapped")
    with probe.perturbed(), _scaled(head, SHARPEN):
        chosen, rejected = _logprobs(probe)
    gap = max((chosen - rejected).flatten().tolist(), key=abs) / SHARPEN or 1e-6
    batch = swapped(step, step.batch) if gap > 0 else dict(step.batch)
    for factor in (margin / abs(gap) for margin in MARGINS if probe.afford(7 / 3, keep=0)):
        probe.cost += 1 / 3  # a look, since a gradient of each would spend the budget
        with probe.perturbed(), _scaled(head, factor):
            loss = probe.twin().look(edits.lifted(batch)).loss
        if math.isfinite(loss) and (row := _compare(probe, FAR_MARGINS, batch, head, factor)).measured != INFINITE:
            return row
    return LAW.not_applicable(FAR_MARGINS, f"{SPENT}, or float64 is not finite either")


def _far_ratios(probe: Probe, head: Tensor, factor: float, batch: edits.Batch) -> Finding:
    """One token of each row is far likelier (in half of the rows: unlikelier) than when it was sampled. Of the loss
    alone: the gradient of a clipped ratio that overflows is infinity times 0. A clip bounds advantages above 0."""
    step, away, subject = probe.step, dict(batch), "far ratios"
    if "advantages" in step.roles:
        away[step.roles["advantages"]] = batch[step.roles["advantages"]].abs()
    for role in (r for r in ("proximal", "behaviour") if r in step.roles):
        old: Tensor = batch[key := step.roles[role]]
        new = far(step, batch, [role], 2.0 if role == step.ratio_role else 3.0, odd=1)[key]
        by = (new - old).abs().reshape(len(old), -1)
        away[key] = torch.where((by == by.amax(-1, keepdim=True)).reshape(old.shape), new, old)
    with probe.may_refuse(subject), probe.perturbed(), _scaled(head, factor):
        shadow = probe.twin()
        theirs, mine = shadow.look(edits.lifted(away)).loss, probe.look(away).loss
    probe.cost += shadow.cost
    largest = min(torch.finfo(p.dtype).max for p in probe.parameters.values())
    return probe.fair(LAW.finding(
        subject, f"the loss is {mine:.3g}, in float64 {theirs:.3g}", "finite",
        math.isfinite(mine) if abs(theirs) <= largest else "not applicable",
        "The loss overflows where a token is far likelier than when it was sampled: an infinite ratio is divided by "
        "itself, or multiplied by 0. Bound the difference of log-probs first, or take a bounded form (its sigmoid).",
    ))  # fmt: skip


def _compare(probe: Probe, what: str, batch: edits.Batch, head: Tensor | None = None, factor: float = 1.0) -> Finding:
    leaves = sum(not list(module.children()) for module in probe.step.model.modules())
    units = 64 * max(1.0, (leaves / 16) ** 0.5)  # errors of n operations add up like √n: 300 in thirty layers
    with probe.perturbed(), _scaled(head, factor):
        usual = batch is probe.off_policy()
        mine = probe.gradient(batch if head is None else dict(batch))
        with probe.may_refuse(what, "a float64 copy cannot be run"):
            shadow = float64_copy(probe) if usual else probe.twin()
            lifted, spent = shadow.off_policy() if usual else edits.lifted(batch), shadow.cost
            theirs = shadow.gradient(lifted)
    room, own = min(0.5, max(0.0 if usual else LOST, units * probe.floor)), 0.0
    change = mine.distance(theirs)
    if room < change and mine.finite() and theirs.norm() > 0:
        # A worse conditioned state? What a unit in the model's own last place does to the exact gradient.
        unit, weights = probe.coarsest, shadow.step.model.parameters()
        with moved(weights, lambda p, noise: unit * p.abs() * noise.sign(), probe.step.seed + 23):
            own = theirs.distance(shadow.gradient(dict(lifted)))  # a copy, so that it is really run again
    probe.cost += shadow.cost - spent
    with probe.perturbed():
        saturated = not usual and theirs.norm() <= SATURATED * probe.gradient(probe.off_policy()).norm()
    if saturated and mine.finite() and theirs.finite():
        return LAW.not_applicable(what, "the float64 gradient is next to 0 as well: what is left of it trains nothing")
    if theirs.norm() == 0 and mine.norm() > 0:
        return LAW.not_applicable(what, "the loss does not use the model that it is given")
    if not theirs.finite():
        return LAW.not_applicable(what, INFINITE)
    if 8 * own > 0.5:
        return LAW.not_applicable(what, f"a unit in the last place moves the float64 gradient itself by {own:.2g}")
    row = probe.fair(LAW.agrees(
        what, change, min(0.5, max(room, units * own)),
        "The gradient is lost to rounding or overflow: log(softmax(x)), log(sigmoid(x)), log(1 - p), an eps that is 0 "
        "in this dtype, a sum in 16 bits. Sum in fp32; use log_softmax, logsigmoid, log1mexp.", "float64 differs by {}",
    ))  # fmt: skip
    lost = not mine.finite() or mine.norm() < SHARE * theirs.norm()
    turned = not ALONG <= mine.best_scale(theirs) <= 1 / ALONG
    return row if usual or lost or turned else LAW.doubtful(row)


def _head(probe: Probe) -> Tensor | None:
    """The last weight matrix that makes outputs confident when it is scaled up; not that of a router or a value."""
    matrices = [p for p in probe.step.model.parameters() if p.ndim == 2][::-1][:TRIED]
    with probe.perturbed():
        before = FAR if len(matrices) < 2 else _farthest(probe)
        for matrix in matrices:
            with _scaled(matrix, SHARPEN):
                if before == FAR or _farthest(probe) > 2 * before:
                    return matrix
    return matrices[0] if matrices else None


@contextmanager
def _scaled(tensor: Tensor | None, factor: float) -> Iterator[None]:
    """Inside, the tensor is this many times as large."""
    with put_back([] if tensor is None else [tensor]):
        if tensor is not None:
            tensor.detach().mul_(factor)
        yield


LAW = Law("F64", "float64 shadow", __doc__, check, quick=False, spare=1)
