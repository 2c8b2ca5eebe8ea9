"""IG: the gradient depends on every declared input, and the reference does not move when the policy does."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from earnest.audit import edits
from earnest.audit.gradient import Gradient
from earnest.audit.law import Law, not_declared
from earnest.audit.probe import Probe
from earnest.audit.verdict import Finding


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    with probe.kicked():
        base = probe.off_policy()
        origin = probe.gradient(base)
        if not origin.finite():
            yield LAW.finding(
                "every input", "not finite off-policy", "finite", False,
                "The gradient is finite as the step is, and NaN or infinite as soon as the policy has moved a little "
                "away from the behaviour and the reference, as it does in training: a root, a logarithm or a division "
                "without room.",
            )  # fmt: skip
            return
        for salt, role in enumerate(r for r in edits.INPUTS if r in step.roles):
            yield _must_matter(probe, role, _change(probe, base, origin, role, 100 + salt))
        if "correct" in step.roles:
            yield _must_matter(probe, "correct", _largest(probe, base, origin))
        if "mask" in step.roles:
            yield _must_matter(probe, "mask", origin.distance(probe.gradient(_thin_mask(probe, base))))
        if "labels" in step.roles:
            yield _must_matter(probe, "labels", origin.distance(probe.gradient(_other_labels(probe, base))))
        for role in ("ids", "attention", "chosen", "rejected"):
            if (other := _other_context(probe, base, role)) is not None:
                yield _must_matter(probe, role, origin.distance(probe.gradient(other)))
    if step.reference is None:
        if "reference" in step.roles or "reference_chosen" in step.roles:
            yield not_declared("IG", "the reference policy", "reference=lambda: …, what the reference says now,")
        return
    yield _reference_stays(probe)


def _must_matter(probe: Probe, role: str, change: float) -> Finding:
    matters = change > 4 * probe.noise()
    return LAW.finding(
        f"input {role} ({probe.step.roles[role]})",
        f"changing it moved the gradient by {change:.2g}",
        "above the step's noise" if probe.noise() else "above 0",
        matters,
        f"The gradient does not depend on {probe.step.roles[role]!r} at all: the value is ignored, overwritten, or "
        "only used under a detach. What is trained is another objective than the one that reads it.",
    )


def _change(probe: Probe, base: edits.Batch, origin: Gradient, role: str, salt: int) -> float:
    """What other values do. Integers have few other ones, and some hide (every row of a group one more): some tries."""
    change = 0.0
    for again in range(1 if base[probe.step.roles[role]].is_floating_point() else 4):
        other = edits.perturb(probe.step, base, role, edits.generator(probe.step, salt + 1000 * again))
        change = max(change, origin.distance(probe.gradient(other)))
        if change > 4 * probe.noise():
            break
    return change


def _largest(probe: Probe, base: edits.Batch, origin: Gradient) -> float:
    """What judging one row the other way changes, at most: a share p(1-p) of right ones is blind to single flips, and a
    flip may leave nothing to train on, which the step may refuse."""
    key, change = probe.step.roles["correct"], 0.0
    for row in range(min(probe.step.rows, 4)):
        value = base[key].clone()
        value[row] = 1 - value[row] if value.dtype != torch.bool else ~value[row]
        try:
            change = max(change, origin.distance(probe.gradient({**base, key: value})))
        except Exception:
            continue
        if change > 4 * probe.noise():
            break
    return change


def _thin_mask(probe: Probe, batch: edits.Batch) -> edits.Batch:
    """Silence every second supervised token of a row; of the batch, where no row has two. Never all of it."""
    key = probe.step.roles["mask"]
    mask = batch[key].clone()
    places = (mask != 0).nonzero()
    row = places[:, 0]
    first = torch.searchsorted(row.contiguous(), row.contiguous())
    within = places[(torch.arange(len(places), device=row.device) - first) % 2 == 1]
    drop = within if len(within) else places[1::2] if len(places) > 1 else places
    mask[tuple(drop.T)] = 0
    return {**batch, key: mask}


def _other_labels(probe: Probe, batch: edits.Batch) -> edits.Batch:
    key = probe.step.roles["labels"]
    labels = batch[key]
    rolled = torch.where(
        labels >= 0, labels.roll(1, dims=0) if labels.shape[0] > 1 else labels.roll(1, dims=-1), labels
    )
    return {**batch, key: torch.where((labels >= 0) & (rolled < 0), labels, rolled)}


def _other_context(probe: Probe, batch: edits.Batch, role: str) -> edits.Batch | None:
    """Other tokens, or fewer visible ones, in front of the first supervised position (anywhere if that is unknown)."""
    step = probe.step
    value = step.value(role)
    if value is None or value.ndim != 2:
        return None
    if role == "attention":
        seen = value != 0
        hidden = seen & (seen.cumsum(-1) % 2 == 1) & (seen.cumsum(-1) < seen.sum(-1, keepdim=True))
        return (
            {**batch, step.roles[role]: torch.where(hidden, torch.zeros_like(value), value)}
            if bool(hidden.any())
            else None
        )
    shown = step.value("attention")
    real = shown != 0 if shown is not None and shown.shape == value.shape else torch.ones_like(value, dtype=torch.bool)
    on = step.value(f"{role}_mask") if role in ("chosen", "rejected") else edits.supervised(step, batch)
    if on is not None and on.shape[0] == value.shape[0] and value.shape[1] - on.shape[1] in (0, 1):
        # Only the context: a token that is a target as well would be felt through the target alone.
        target = torch.nn.functional.pad((on != 0).long(), (value.shape[1] - on.shape[1], 0))
        context = real & (target.cumsum(-1) == 0)
        real = context if bool(context.any()) else real
    # Rows of one prompt share their context, so tokens are drawn from the whole batch.
    order = torch.randperm(value.numel(), generator=edits.generator(step, 55)).to(value.device)
    other = value.flatten()[order].reshape(value.shape)
    return {**batch, step.roles[role]: torch.where(real, other, value)}


def _reference_stays(probe: Probe) -> Finding:
    reference = probe.step.reference
    assert reference is not None
    with torch.no_grad():
        before = reference().detach().clone()
        again = reference().detach().clone()
        with probe.kicked(0.2):
            after = reference().detach().clone()
    noise = float((before - again).abs().max())
    change = float((before - after).abs().max())
    return LAW.finding(
        "the reference policy",
        f"kicking the policy moved it by {change:.2g}",
        "0",
        change <= 4 * noise,
        "The reference follows the policy that it should hold: both are the same weights (an adapter that was "
        "injected in place, a disable_adapter() that is not used as a context manager). Its KL is 0 whatever "
        "happens.",
    )


LAW = Law(
    code="IG",
    name="inputs",
    sentence="The gradient depends on every declared input, and the reference does not move when the policy does.",
    needs="roles; reference=… for the reference policy",
    how="Each input is changed where the loss is taken, from a kicked, off-policy state, and the gradient must change.",
    traps="At ratio 1 behaviour log-probs may not matter, and at the reference its KL has no gradient: both are left "
    "first.",
    caught="SkyRL #1353 and #1053, mlx-lm-lora #50, Liger #1082, verl #2513, CLaaS #37, TRL #1534",
    check=check,
)
