"""MI: Signals where no loss is taken, ids under padding, more padding and rows without a supervised token do not
matter.

Needs: roles mask or labels, or chosen_mask and rejected_mask; ids and the attention masks for the rest
How: Each is changed or added; the gradient must stay the same within the step's own resolution.
Exceptions: Prompt tokens do matter, through attention. A sequence mean may count a row without supervised tokens, so a
factor B/(B+1) is allowed. Left padding is added only where the batch has some. Tensors that have the rows' width by
accident (prompts beside completions) must not be padded with them, so other readings are tried. Per-token rewards that
are 0 wherever they are masked may be summed without the mask.
Detects: verl #2513, #1440 and #6362, TRL #4170, AReaL #1346, a KL barrier that is NaN on an empty mask
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from earnest.audit import edits
from earnest.audit.gradient import Gradient
from earnest.audit.law import Law
from earnest.audit.probe import Probe
from earnest.audit.verdict import Finding

MASKED = "a fully masked row"


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    paired = [s for s in edits.SIDES if s in step.roles and {f"{s}_mask", f"{s}_attention"} & step.roles.keys()]
    if edits.supervised(step) is None and not paired:
        what = '{"chosen_mask": …, "rejected_mask": …}' if step.kind == "preference" else '{"mask": …} or {"labels": …}'
        yield LAW.not_declared("masks", f"roles={what}")
        return
    with probe.perturbed():
        base = probe.off_policy()
        origin = probe.gradient(base)
        if not origin.finite():
            yield LAW.not_applicable("masks", "not finite off-policy", "see IG.")
            return
        both = None if paired else _both(probe)
        parts = {"signals where masked": _signals(probe, base, origin), "more padding": _padding(probe, both)}
        if not paired:
            parts[MASKED] = _masked_row(probe, both)
        for subject, part in parts.items():
            try:
                yield from part
            except Exception as error:
                yield LAW.unchecked(subject, error)


def _signals(probe: Probe, base: edits.Batch, origin: Gradient) -> Iterator[Finding]:
    """All per-token signals at once; if the gradient changes, one at a time, to find which of them matters."""
    step = probe.step
    changes: dict[str, edits.Batch] = {}
    for salt, role in enumerate(r for r in edits.PER_TOKEN if r in step.roles):
        bounds = edits.bounds(step, role)
        if bounds is None or bool(bounds[1].all()):
            continue
        where = ~bounds[1].expand_as(step.batch[step.roles[role]])
        if role == "rewards":  # may be summed without a mask if they are 0 where masked
            where = where & (step.batch[step.roles[role]] != 0)
        changed = edits.perturb(step, base, role, edits.generator(step, 300 + salt), where=where)
        if not torch.equal(changed[step.roles[role]], base[step.roles[role]]):
            changes[role] = changed
    for role, attention in (("ids", "attention"), *((s, f"{s}_attention") for s in edits.SIDES)):
        if (hidden := _under_padding(probe, base, role, attention)) is not None:
            changes[role] = hidden
    if not changes:
        yield LAW.not_applicable("signals where masked", "no declared signal is masked")
        return
    whole = {**base, **{step.roles[r]: b[step.roles[r]] for r, b in changes.items()}}
    together = origin.distance(probe.gradient(whole))
    if together <= probe.tolerance:
        yield _must_not_matter(probe, f"{', '.join(changes)} where masked", together, "")
        return
    for role, changed in changes.items():
        yield _must_not_matter(
            probe,
            f"{role} where masked",
            origin.distance(probe.gradient(changed)),
            f"{step.roles[role]!r} enters at masked positions: the mask is not applied to it, does not reach the "
            "model, is shifted by one, or another tensor is used in its place.",
        )


def _must_not_matter(probe: Probe, subject: str, change: float, meaning: str) -> Finding:
    return LAW.finding(
        subject, f"moved the gradient by {change:.2g}", f"≤ {probe.tolerance:.1g}", change <= probe.tolerance, meaning
    )


def _under_padding(probe: Probe, batch: edits.Batch, role: str, mask: str) -> edits.Batch | None:
    """Another id wherever the attention mask is 0."""
    step = probe.step
    attention, ids = step.value(mask), step.value(role)
    if attention is None or ids is None or bool((attention != 0).all()) or attention.shape != ids.shape:
        return None
    return {**batch, step.roles[role]: edits.other_ids(step, ids.clamp_min(0), attention == 0)}


def _both(probe: Probe) -> Gradient | None:
    """The gradient with three more columns and one more row, all masked; None where that cannot be run."""
    step = probe.step
    if _coupled(probe) or step.value("ids") is None:
        return None
    try:
        found = probe.gradient(edits.add_masked_row(replace(step, batch=edits.pad(step))))
    except Exception:
        return None
    return found if found.finite() else None


def _coupled(probe: Probe) -> bool:
    return probe.step.rows_interact or bool({"group", "rewards"} & probe.step.roles.keys())


def _padding(probe: Probe, both: Gradient | None) -> Iterator[Finding]:
    step = probe.step
    paired = all(s in step.roles for s in edits.SIDES)
    sides = all({f"{s}_mask", f"{s}_attention"} & step.roles.keys() for s in edits.SIDES)
    if not (edits.supervised(step) is not None or sides) or (step.value("ids") is None and not paired):
        what = 'roles={"chosen_mask": …, "rejected_mask": …}' if paired else 'roles={"ids": …} beside the mask'
        yield LAW.not_declared("more padding", what)
        return
    for side in ("right", "left"):
        subject = f"3 more columns of padding on the {side}"
        if side == "left" and not _pads_left(probe):
            # A step whose batches have no left padding need not support it: absolute positions may begin at 0.
            yield LAW.not_applicable(subject, "no row of this batch begins with padding")
            return
        # Both changes at once; a mean over rows counts the added row, so then the padding alone.
        at_once = probe.gradient().distance(both) if side == "right" and both is not None else math.inf
        change = at_once if at_once <= probe.tolerance else _padded(probe, side)
        if isinstance(change, Exception):
            why = f"cannot be run ({type(change).__name__})"
            yield LAW.not_applicable(subject, why, str(change)[:120])
            return
        yield probe.fair(_must_not_matter(
            probe, subject, change,
            "The gradient depends on how far the batch is padded: a mean over positions counts "
            "padding, padded positions are supervised, or positions are counted from the first padded one.",
        ))  # fmt: skip


def _padded(probe: Probe, side: str) -> float | Exception:
    """The smallest change by padding, over the possible sets of tensors that are padded together."""
    found: list[float] = []
    first: Exception | None = None
    for batch in edits.paddings(probe.step, side):
        try:
            found.append(probe.gradient().distance(probe.gradient(batch)))
        except Exception as error:
            first = first or error
            continue
        if found[-1] <= probe.tolerance:
            break
    return min(found) if found else first or ValueError("no tensor has the rows' width")


def _pads_left(probe: Probe) -> bool:
    """Whether a row begins with padding, by the attention mask of the ids."""
    pairs = [(probe.step.value(m), probe.step.value(r)) for r, m in
             (("ids", "attention"), *((s, f"{s}_attention") for s in edits.SIDES))]  # fmt: skip
    return any(
        shown is not None and ids is not None and shown.shape == ids.shape and bool((shown[:, 0] == 0).any())
        for shown, ids in pairs
    )


def _masked_row(probe: Probe, both: Gradient | None) -> Iterator[Finding]:
    step = probe.step
    if _coupled(probe):
        yield LAW.not_applicable(MASKED, "rows interact by declaration")
        return
    whole = probe.gradient()
    try:
        masked = both if both is not None and _counts(probe, both) else probe.gradient(edits.add_masked_row(step))
    except Exception as error:
        why = f"one more row cannot be run ({type(error).__name__})"
        needs = "The loss needs its rows together (fixed group or pair sizes)."
        yield LAW.not_applicable(MASKED, why, needs)
        return
    if not masked.finite():
        yield LAW.finding(
            MASKED, "the gradient is not finite", "finite", False,
            "A row without a single supervised token gives 0/0; divide by max(count, 1).",
        )  # fmt: skip
        return
    factor = masked.best_scale(whole)
    rest = masked.distance(whole.times(factor))
    yield probe.fair(LAW.finding(
        MASKED,
        f"the gradient is {factor:.3g}× the same up to {rest:.2g}",
        f"the same direction, {step.rows}/{step.rows + 1} ≤ factor ≤ 1",
        rest <= probe.tolerance and step.rows / (step.rows + 1) - 0.02 <= factor <= 1.02,
        "A row in which no loss is taken changes the gradient's direction: some part of the loss ignores the mask.",
    ))  # fmt: skip


def _counts(probe: Probe, masked: Gradient) -> bool:
    """Whether the gradient is the same, with the masked row counted as a row or not at all."""
    whole, rows = probe.gradient(), probe.step.rows
    return any(whole.times(factor).distance(masked) <= probe.tolerance for factor in (1.0, rows / (rows + 1)))


LAW = Law.of("MI", "masks", __doc__, check)
