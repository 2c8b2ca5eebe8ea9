"""IG: The gradient depends on every declared input; the reference is deterministic and does not move when the policy
does. Old values of a critic matter from far away, too.

max((v - R)², (clipped v - R)²) depends on old values that are far from every return; the minimum of the two does not

Needs: roles; reference=… for the reference policy
How: Each input is changed, from a perturbed, off-policy state; the gradient must change. Signals and labels are changed
where the loss is taken. Of ids, first only tokens without a loss are changed that supervised ones follow (a prompt),
then all. Tensors without a role that the loss never reads are listed.
Exceptions: At ratio 1 behaviour log-probs may not matter, and at the reference its KL has a zero gradient, so both
states are left first. A term of weight 0 reads nothing, and a hinge depends on its reference only beyond its corner: a
weight of 1 and extreme values are tried before the law fails.
Warns: (rows "context in …" and "never read: …") a model that reads no earlier token, a prompt that the loss reads from
another tensor, or a tensor that is in the batch for something else.
Detects: SkyRL #1353 and #1053, mlx-lm-lora #50, Liger #1082, verl #2513, CLaaS #37, TRL #1534, openai/baselines #765
(a clipped value loss that takes the smaller error)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.measure import RecordingBatch
from earnest_audit.probe import Change, Probe
from earnest_audit.restore import seeded
from earnest_audit.step import Step
from earnest_audit.subjects.base import gap, largest

TEXTS = ("ids", "chosen", "rejected")
SHOWN = ("attention", "chosen_attention", "rejected_attention")
FAR = 1e3  # times the largest value or return: no clip range reaches there
HIDDEN = "Hiding tokens in {!r} leaves the gradient unchanged: the mask does not reach the model."
IGNORED = "The gradient does not depend on {!r} at all: it is ignored, overwritten, or only used under a detach."
UNSEEN = (
    "Other tokens in {!r} before the supervised ones leave the gradient unchanged: the model is given other tokens, it "
    "does not attend to them, or each label is predicted from its own token (labels that are not shifted)."
)


def check(probe: Probe) -> Rows:
    step = probe.step
    LAW.needs(probe.gradient().finite(), "every input", "the gradient is not finite", "See GL.")
    with probe.perturbed():
        base = probe.off_policy()
        if not probe.gradient(base).finite():
            raise Ends(LAW.finding(
                "every input", "not finite off-policy", "finite", False,
                "The gradient is NaN or infinite once the policy differs a little from the behaviour and the "
                "reference, as it does in training: a root, a logarithm or a division by 0.",
            ))  # fmt: skip
        ignored = set()
        for role, changes in _edits(probe, base):
            key = step.roles[role]
            meaning = (HIDDEN if role in SHOWN else IGNORED).format(key)
            row = probe.matters(f"input {role} ({key})", changes, meaning)
            ignored |= {role} if row.outcome == "fails" else set()
            yield row
        for role in (r for r in TEXTS if r in step.roles):
            yield from _text(probe, base, role)
        if {"values", "returns"} <= step.roles.keys() - ignored and "rewards" not in step.roles:
            yield from _far_values(probe, base)
    yield from _never_read(probe)
    if step.reference is not None:
        yield from _reference_stays(probe, step.reference)
    elif {"reference", "reference_chosen"} & step.roles.keys():
        yield LAW.not_declared("the reference policy", "reference=lambda: …, the reference's log-probs,")


def _far_values(probe: Probe, base: edits.Batch) -> Rows:
    """Of two sets of old values, both far from every return, each has a loss of its own."""
    key, returns = (probe.step.roles[r] for r in ("values", "returns"))
    size = FAR * max(1.0, *(float(base[k].float().abs().max()) for k in (key, returns)))
    sign = edits.noise_like(base[key], edits.generator(probe.step, 71)).sign()
    one, two = (probe.look({**base, key: (n * size * sign).to(base[key].dtype)}).loss for n in (1, 2))
    if math.isfinite(one) and math.isfinite(two):
        yield LAW.finding(
            f"input values ({key}), far away", f"the loss is {one:.4g} with one set, {two:.4g} with another",
            "not the same", abs(two - one) > 4 * probe.noise * abs(one),
            "Old values that are a thousand times too large do not matter: the smaller of the plain and the clipped "
            "value error counts. With that minimum, values that went the wrong way are never corrected.",
        )  # fmt: skip


def _edits(probe: Probe, base: edits.Batch) -> Iterator[tuple[str, Iterable[Change]]]:
    """Every declared role, with the changes of the gradient by edits of it, from mild to strong."""
    step = probe.step
    for salt, role in enumerate(r for r in edits.INPUTS if r in step.roles):
        yield role, _values(probe, base, role, 100 + salt)
    if "correct" in step.roles:
        yield "correct", _flips(probe, base)
    for role in (r for r in ("mask", "chosen_mask", "rejected_mask") if r in step.roles):
        yield role, _one(probe, base, role, _thinner(base[step.roles[role]], 0))
    if "labels" in step.roles:
        yield "labels", _labels(probe, base)
    positions = step.value("positions")
    if positions is not None and positions.ndim > 1 and not positions.equal(positions.flip(-1)):
        yield "positions", _one(probe, base, "positions", positions.flip(-1))  # legal, and no distance stays
    for role in (r for r in SHOWN if r in step.roles):
        mask = step.batch[step.roles[role]]
        if mask.ndim == 2 and bool(((mask != 0).sum(-1) > 1).any()):  # of one token a row, none can be hidden
            yield role, _hidden(probe, base, role)


def _text(probe: Probe, base: edits.Batch, role: str) -> Rows:
    """Other tokens before the supervised ones; where these do not matter, a warning, and other tokens anywhere."""
    step, key = probe.step, probe.step.roles[role]
    ids: Tensor = base[key]
    if ids.ndim != 2:
        return
    # Rows of one prompt have equal tokens in one place, so they are drawn from the whole batch.
    order = torch.randperm(ids.numel(), generator=edits.generator(step, 55)).to(ids.device)
    other, context = ids.flatten()[order].reshape(ids.shape), _context(step, role, ids)
    if bool(context.any()):
        where = ", in the tokens before the supervised ones"
        before = _one(probe, base, role, torch.where(context, other, ids), where)
        row = probe.matters(f"context in {role} ({key})", before, UNSEEN.format(key))
        if row.outcome == "holds":
            yield replace(row, subject=f"input {role} ({key})")
            return
        yield LAW.doubtful(row)
    yield probe.matters(f"input {role} ({key})", _one(probe, base, role, other), IGNORED.format(key))


def _context(step: Step, role: str, ids: Tensor) -> Tensor:
    """The real tokens before a target of their row or document, without targets; none where those are not known."""
    paired = role in edits.SIDES
    on = step.value(f"{role}_mask") if paired else edits.supervised(step)
    wide = edits.widened(on != 0, ids.shape[1]) if on is not None and on.ndim == 2 and len(on) == len(ids) else None
    if wide is None:
        return torch.zeros_like(ids, dtype=torch.bool)
    target = torch.nn.functional.pad(wide, (1, -1)) if edits.ahead(step) else wide
    follows = torch.ones_like(wide[:1, :, None] | wide[:1, None, :]).triu()
    if (documents := step.value("documents")) is not None and documents.shape == ids.shape:
        follows = follows & (documents[:, :, None] == documents[:, None, :])
    context = ~target & (follows & target[:, None, :]).any(-1)
    shown = step.value(f"{role}_attention" if paired else "attention")
    return context & (shown != 0) if shown is not None and shown.shape == ids.shape else context


def _one(probe: Probe, base: edits.Batch, role: str, value: Tensor, how: str = "") -> Iterator[Change]:
    yield probe.change({**base, probe.step.roles[role]: value}, base), how


def _values(probe: Probe, base: edits.Batch, role: str, salt: int) -> Iterator[Change]:
    """Other values: usual ones (integers have few, and some have no effect: several tries), then with zero weights set
    to 1 (a KL of weight 0 reads no reference), then extreme ones (a hinge depends on its reference only beyond its
    corner, a clipped value on the old one beyond the clip)."""
    step, key = probe.step, probe.step.roles[role]
    tries = range(1 if base[key].is_floating_point() else 4)
    usual = [edits.perturb(step, base, role, edits.generator(step, salt + 1000 * again)) for again in tries]
    yield from ((probe.change(other, base), "") for other in usual)
    if on := {k: 1.0 for k in step.terms_off if not step.knobs[k]}:
        yield probe.change(usual[0], base, on), f", at {' and '.join(f'{k} = 1' for k in on)} (it is 0)"
    far_away = ", far away"
    if role in ("values", "returns"):
        beyond = base[key] + FAR * (usual[0][key] - base[key])
        yield from _one(probe, base, role, beyond.to(base[key].dtype), far_away)
    if role not in edits.LOGPROBS:
        return
    # Much less likely rows and almost certain ones; then the same where all other references are extreme, too.
    yield from ((probe.change(far(step, base, [role], 30.0, odd), base), far_away) for odd in (0, 1))
    if others := [r for r in edits.LOGPROBS if r in step.roles and r != role]:
        away = probe.kept(f"all but {role} far away", lambda: far(step, base, others, 300.0))
        if probe.gradient(away).finite():
            yield probe.change(far(step, away, [role], 1e4), away), far_away


def far(step: Step, base: edits.Batch, roles: Sequence[str], factor: float, odd: int = 0) -> edits.Batch:
    """Half of the rows almost certain, the least likely ones (``odd``: the likeliest), and the others ``factor`` times
    as unlikely."""
    batch = dict(base)
    for key in (step.roles[r] for r in roles):
        old: Tensor = base[key]
        rank = old.float().reshape(len(old), -1).sum(-1).argsort(stable=True).argsort()
        lift = (2 * rank < len(old)) if not odd else (2 * rank >= len(old))
        there = torch.where(lift.reshape(-1, *[1] * (old.ndim - 1)), old / (100 * factor), old * factor).to(old.dtype)
        where = edits.fit(edits.supervised(step, base), old)
        batch[key] = there if where is None else torch.where(where, there, old)
    return batch


def _flips(probe: Probe, base: edits.Batch) -> Iterator[Change]:
    """One row's value is flipped: p(1-p) may not change with a single flip, and a flip may leave nothing to train on,
    which the step may refuse."""
    for row in range(min(probe.step.rows, 4)):
        value = base[probe.step.roles["correct"]].clone()
        value[row] = value[row] == 0
        with suppress(Exception):
            yield from _one(probe, base, "correct", value)


def _thinner(old: Tensor, off: int) -> Tensor:
    """Every second supervised token of a row is ``off``; of the batch, where no row has two; or the only one."""
    rows = (old != off).reshape(len(old), -1)
    second = (on & (on.cumsum(-1) % 2 == 0) for on in (rows, rows.flatten()))
    dropped = next((places for places in second if bool(places.any())), rows)
    return old.masked_fill(dropped.reshape(old.shape), off)


def _labels(probe: Probe, base: edits.Batch) -> Iterator[Change]:
    """Other targets; or fewer of them, where labels only mark positions and the ids are the targets."""
    labels: Tensor = base[probe.step.roles["labels"]]
    rolled = labels.roll(1, dims=0) if labels.shape[0] > 1 else labels.roll(1, dims=-1)
    yield from _one(probe, base, "labels", torch.where((labels >= 0) & (rolled >= 0), rolled, labels))
    if (off := probe.step.ignored) is not None:
        yield from _one(probe, base, "labels", _thinner(labels, off), ", by their positions only")


def _hidden(probe: Probe, base: edits.Batch, role: str) -> Iterator[Change]:
    """Fewer visible tokens; then without the last one, where only the end of a row is read from a mask (a score at the
    last token of a causal model)."""
    mask: Tensor = base[probe.step.roles[role]]
    seen = mask != 0
    place, count = seen.cumsum(-1), seen.sum(-1, keepdim=True)
    odd, ends = seen & (place % 2 == 1) & (place < count), seen & (place == count) & (count > 1)
    for hidden, how in ((odd, ", every second real token hidden"), (ends, ", the last real token hidden")):
        if bool(hidden.any()):
            yield from _one(probe, base, role, mask.masked_fill(hidden, 0), how)


def _never_read(probe: Probe) -> Rows:
    """Tensors without a role that the loss does not read. Passing the whole batch on (**batch) reads everything."""
    step, recording = probe.step, RecordingBatch()
    others = [k for k, v in step.batch.items() if isinstance(v, Tensor) and k not in step.roles.values()]

    def loss(model: nn.Module, copied: Mapping[str, Any]) -> Any:
        recording.update(copied)
        return step.loss(model, recording, **probe.settings())

    try:
        if others:
            probe.forward(loss, graph=False)
    except Exception:
        return  # some code takes plain dicts only
    if unread := ", ".join(str(k) for k in others if k not in recording.accessed):
        why = f"Declare the role of {unread} where the loss should read it, or leave it out of the batch."
        yield LAW.doubtful(LAW.finding(f"never read: {unread}", "the loss does not read it", "read", False, why))


def _reference_stays(probe: Probe, reference: Callable[[], Tensor]) -> Rows:
    """The reference gives the same log-probs under another seed and after the policy has changed."""
    seed = probe.step.seed

    def logprobs(at: int) -> Tensor:
        with torch.no_grad(), seeded(at):
            return reference().detach().clone()

    before, again, redrawn = logprobs(seed), logprobs(seed), logprobs(seed + 1)
    with probe.perturbed(0.2):
        after = logprobs(seed)
    noise, drawn, change = (largest(gap(before, other)) for other in (again, redrawn, after))
    yield LAW.finding(
        "the reference policy, drawn again", f"another seed changed it by {drawn:.2g}", "0", drawn <= 4 * noise,
        "The reference is random, and so is every KL and margin: its model is in train mode (call .eval()) or samples.",
    )  # fmt: skip
    yield LAW.finding(
        "the reference policy", f"perturbing the policy changed it by {change:.2g}", "0", change <= 4 * noise,
        "The reference changes with the policy: both are the same weights (an adapter that was injected in place, a "
        "disable_adapter() that is not used as a context manager). Its KL is 0 whatever happens.",
    )  # fmt: skip


LAW = Law("IG", "inputs", __doc__, check)
