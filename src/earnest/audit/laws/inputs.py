"""IG: The gradient depends on every declared input; the reference is deterministic and does not move when the policy
does.

Needs: roles; reference=… for the reference policy
How: Each input is changed where the loss is taken, from a perturbed, off-policy state; the gradient must change.
Exceptions: At ratio 1 behaviour log-probs may not matter, and at the reference its KL has a zero gradient, so both
states are left first. A term of weight 0 reads nothing, and a hinge depends on its reference only beyond its corner: a
weight of 1 and extreme values are tried before the law fails.
Detects: SkyRL #1353 and #1053, mlx-lm-lora #50, Liger #1082, verl #2513, CLaaS #37, TRL #1534
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from earnest.audit import edits
from earnest.audit.gradient import Gradient
from earnest.audit.law import Law
from earnest.audit.probe import Probe, seeded
from earnest.audit.step import Step
from earnest.audit.verdict import Finding


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    with probe.perturbed():
        base = probe.off_policy()
        origin = probe.gradient(base)
        if not origin.finite():
            yield LAW.finding(
                "every input", "not finite off-policy", "finite", False,
                "The gradient is finite on the given batch, and NaN or infinite once the policy differs a little from "
                "the "
                "behaviour and the reference, as it does in training: a root, a logarithm or a division by 0.",
            )  # fmt: skip
            return
        for salt, role in enumerate(r for r in edits.INPUTS if r in step.roles):
            yield _values(probe, base, origin, role, 100 + salt)
        if (other := _other_vocabulary(probe, base)) is not None:
            change = origin.distance(probe.gradient(other))
            yield LAW.finding(
                "the teacher's tokens", f"its numbers at other tokens moved the gradient by {change:.2g}",
                f"above {probe.tolerance:.1g}", True if change > probe.tolerance else "not declared",
                "It does not matter which tokens the teacher finds likely: its values are sorted, or compared with the "
                "student's by rank. Across two vocabularies that is intended (ULD), within one it is not.",
            )  # fmt: skip
        if "correct" in step.roles:
            yield _must_matter(probe, "correct", _largest(probe, base, origin))
        for role in ("mask", "chosen_mask", "rejected_mask"):
            if role in step.roles:
                yield _must_matter(probe, role, origin.distance(probe.gradient(_thin_mask(probe, base, role))))
        if "labels" in step.roles:
            yield _labels(probe, base, origin)
        if (other := _other_positions(probe, base)) is not None:
            yield _must_matter(probe, "positions", origin.distance(probe.gradient(other)))
        for role in ("ids", "attention", "chosen", "rejected", "chosen_attention", "rejected_attention"):
            if (other := _other_context(probe, base, role)) is not None:
                yield _must_matter(probe, role, origin.distance(probe.gradient(other)))
    if step.reference is None:
        if "reference" in step.roles or "reference_chosen" in step.roles:
            yield LAW.not_declared("the reference policy", "reference=lambda: …, the reference's log-probs,")
        return
    yield from _reference_stays(probe)


def _must_matter(probe: Probe, role: str, change: float, how: str = "") -> Finding:
    matters = change > 4 * probe.noise()
    return LAW.finding(
        f"input {role} ({probe.step.roles[role]})",
        f"changing it moved the gradient by {change:.2g}{how}",
        "above the step's noise" if probe.noise() else "above 0",
        matters,
        f"The gradient does not depend on {probe.step.roles[role]!r} at all: the value is ignored, overwritten, or "
        "only used under a detach. What is trained is another objective than the one that reads it.",
    )


def _values(probe: Probe, base: edits.Batch, origin: Gradient, role: str, salt: int) -> Finding:
    """The change by other values: usual ones, then with zero weights set to 1 (a KL of weight 0 reads no reference),
    then extreme ones (a hinge depends on its reference only beyond its corner)."""
    change = _change(probe, base, origin, role, salt)
    if change > 4 * probe.noise():
        return _must_matter(probe, role, change)
    if on := _zero_weights(probe.step):
        other = edits.perturb(probe.step, base, role, edits.generator(probe.step, salt))
        change = probe.gradient(base, on).distance(probe.gradient(other, on))
        if change > 4 * probe.noise():
            values = " and ".join(f"{k} = {v:g}" for k, v in on.items())
            return _must_matter(probe, role, change, f", at {values} (it is 0)")
    if role in edits.LOGPROBS:
        return _must_matter(probe, role, _change_by_extremes(probe, base, origin, role), ", far away")
    return _must_matter(probe, role, change)


def _change_by_extremes(probe: Probe, base: edits.Batch, origin: Gradient, role: str) -> float:
    """Much less likely rows and almost certain ones; then the same where all other references are extreme, too."""
    others, change = [r for r in edits.LOGPROBS if r in probe.step.roles and r != role], 0.0
    for odd in (0, 1):
        change = max(change, origin.distance(probe.gradient(far(probe.step, base, [role], 30.0, odd))))
        if change > 4 * probe.noise():
            return change
    if not others:
        return change
    away = probe.kept_batch(f"all but {role} far away", lambda: far(probe.step, base, others, 300.0))
    there = probe.gradient(away)
    return there.distance(probe.gradient(far(probe.step, away, [role], 1e4))) if there.finite() else change


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


def _zero_weights(step: Step) -> dict[str, float]:
    """Declared weights that are 0, at 1."""
    return {k: 1.0 for k in step.terms_off if not step.knobs[k]}


def _change(probe: Probe, base: edits.Batch, origin: Gradient, role: str, salt: int) -> float:
    """The change by other values. Integers have few, and some have no effect (all of a group one more): several
    tries."""
    change = 0.0
    for again in range(1 if base[probe.step.roles[role]].is_floating_point() else 4):
        other = edits.perturb(probe.step, base, role, edits.generator(probe.step, salt + 1000 * again))
        change = max(change, origin.distance(probe.gradient(other)))
        if change > 4 * probe.noise():
            break
    return change


def _largest(probe: Probe, base: edits.Batch, origin: Gradient) -> float:
    """The largest change by flipping one row's value: p(1-p) may not change with a single flip, and a flip may leave
    nothing to train on, which the step may refuse."""
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


def _thin_mask(probe: Probe, batch: edits.Batch, role: str) -> edits.Batch:
    """Mask every second supervised token of a row; of the batch, where no row has two. Never all of them."""
    key = probe.step.roles[role]
    return {**batch, key: torch.where(_every_second(batch[key] != 0), torch.zeros_like(batch[key]), batch[key])}


def _every_second(on: Tensor) -> Tensor:
    places = on.nonzero()
    row = places[:, 0]
    first = torch.searchsorted(row.contiguous(), row.contiguous())
    within = places[(torch.arange(len(places), device=row.device) - first) % 2 == 1]
    drop = within if len(within) else places[1::2] if len(places) > 1 else places
    dropped = torch.zeros_like(on)
    dropped[tuple(drop.T)] = True
    return dropped


def _labels(probe: Probe, base: edits.Batch, origin: Gradient) -> Finding:
    """Other targets; or fewer of them, where labels only mark positions and the ids are the targets."""
    change = origin.distance(probe.gradient(_other_labels(probe, base)))
    if change > 4 * probe.noise():
        return _must_matter(probe, "labels", change)
    key = probe.step.roles["labels"]
    fewer = torch.where(_every_second(base[key] != -100), torch.full_like(base[key], -100), base[key])
    return _must_matter(
        probe, "labels", origin.distance(probe.gradient({**base, key: fewer})), ", by their positions only"
    )


def _other_vocabulary(probe: Probe, batch: edits.Batch) -> edits.Batch | None:
    """The teacher's probabilities at other tokens: a comparison by rank does not change. Only where the vocabulary is
    the student's; across two vocabularies only ranks can be compared (ULD)."""
    value = probe.step.value("teacher")
    if value is None or value.ndim < 3 or not value.is_floating_point() or value.shape[-1] < 3:
        return None
    if probe.coarse or not probe.afford(1):
        return None
    matrices = [p for p in probe.step.model.parameters() if p.ndim == 2]
    if not any(value.shape[-1] in p.shape for p in matrices):
        return None
    return {**batch, probe.step.roles["teacher"]: value.roll(1, dims=-1)}


def _other_positions(probe: Probe, batch: edits.Batch) -> edits.Batch | None:
    """Every row's positions in reverse: legal ones, and further apart from each other for no pair of tokens alike."""
    value = probe.step.value("positions")
    if value is None or value.ndim < 2 or torch.equal(value, value.flip(-1)):
        return None
    return {**batch, probe.step.roles["positions"]: value.flip(-1)}


def _other_labels(probe: Probe, batch: edits.Batch) -> edits.Batch:
    key = probe.step.roles["labels"]
    labels = batch[key]
    rolled = torch.where(
        labels >= 0, labels.roll(1, dims=0) if labels.shape[0] > 1 else labels.roll(1, dims=-1), labels
    )
    return {**batch, key: torch.where((labels >= 0) & (rolled < 0), labels, rolled)}


def _other_context(probe: Probe, batch: edits.Batch, role: str) -> edits.Batch | None:
    """Other tokens, or fewer visible ones, where no loss is taken and some follows (anywhere if that is unknown)."""
    step = probe.step
    value = step.value(role)
    if value is None or value.ndim != 2:
        return None
    if role.endswith("attention"):
        seen = value != 0
        hidden = seen & (seen.cumsum(-1) % 2 == 1) & (seen.cumsum(-1) < seen.sum(-1, keepdim=True))
        return (
            {**batch, step.roles[role]: torch.where(hidden, torch.zeros_like(value), value)}
            if bool(hidden.any())
            else None
        )
    shown = step.value(f"{role}_attention" if role in edits.SIDES else "attention")
    real = shown != 0 if shown is not None and shown.shape == value.shape else torch.ones_like(value, dtype=torch.bool)
    on = step.value(f"{role}_mask") if role in ("chosen", "rejected") else edits.supervised(step, batch)
    if on is not None and on.shape[0] == value.shape[0] and value.shape[1] - on.shape[1] in (0, 1):
        # Only the context: a token that is also a target would matter through the target alone.
        target = torch.nn.functional.pad((on != 0).long(), (value.shape[1] - on.shape[1], 0))
        # Packed rows have prompts after answers too, so any token that some answer follows is one.
        follows = target.flip(-1).cumsum(-1).flip(-1) > 0
        context = real & (target == 0) & follows
        real = context if bool(context.any()) else real
    # Rows of one prompt share their context, so tokens are drawn from the whole batch.
    order = torch.randperm(value.numel(), generator=edits.generator(step, 55)).to(value.device)
    other = value.flatten()[order].reshape(value.shape)
    return {**batch, step.roles[role]: torch.where(real, other, value)}


def _reference_stays(probe: Probe) -> Iterator[Finding]:
    """The reference gives the same log-probs under another seed and after the policy has changed."""
    reference, seed = probe.step.reference, probe.step.seed
    assert reference is not None

    def logprobs(at: int) -> Tensor:
        with torch.no_grad(), seeded(at):
            return reference().detach().clone()

    before, redrawn = logprobs(seed), logprobs(seed + 1)
    with probe.perturbed(0.2):
        after = logprobs(seed)
    noise = _largest_difference(before, logprobs(seed))
    drawn, change = _largest_difference(before, redrawn), _largest_difference(before, after)
    if drawn > 4 * noise:
        yield LAW.finding(
            "the reference policy, drawn again",
            f"another seed changed it by {drawn:.2g}",
            "0",
            False,
            "The reference is random: its model is in train mode (dropout), or it samples. Its noise is in every "
            "KL and every margin. Call .eval() on it.",
        )
    yield LAW.finding(
        "the reference policy",
        f"perturbing the policy changed it by {change:.2g}",
        "0",
        change <= 4 * noise,
        "The reference changes with the policy: both are the same weights (an adapter that was "
        "injected in place, a disable_adapter() that is not used as a context manager). Its KL is 0 whatever "
        "happens.",
    )


def _largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest difference; equal infinities do not differ."""
    return float(torch.where(a == b, torch.zeros_like(a), a - b).abs().max()) if a.numel() else 0.0


LAW = Law.of("IG", "inputs", __doc__, check)
