"""MI: Signals where no loss is taken, ids under padding, more padding and rows without a supervised token do not
matter.

Needs: roles mask or labels, or chosen_mask and rejected_mask; ids and the attention masks for the rest (where no mask
is declared, an attention mask with padding is enough for more padding)
How: Each is changed or added; the gradient must stay the same within the step's own resolution.
Exceptions: Prompt tokens do matter, through attention. A sequence mean may count a row without supervised tokens, so a
factor B/(B+1) is allowed. Left padding is added only where the batch has some. Tensors that have the rows' width by
accident (prompts beside completions) must not be padded with them: declare wide; where only another guess holds, the
row is "not declared". Per-token rewards that are 0 wherever they are masked may be summed without the mask. A term of
the loss with a mask of its own declares it in masks.
Detects: verl #2513, #1440 and #6362, TRL #4170, AReaL #1346, a KL barrier that is NaN on an empty mask
"""

from __future__ import annotations

from functools import partial

import torch

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.probe import Probe
from earnest_audit.verdict import Finding

MASKED = "a fully masked row"
WIDE = 'wide=("…",), the tensors that are padded with the rows,'
TEXTS = (("ids", "attention"), *((s, f"{s}_attention") for s in edits.SIDES))


def check(probe: Probe) -> Rows:
    step = probe.step
    paired = [s for s in edits.SIDES if s in step.roles and {f"{s}_mask", f"{s}_attention"} & step.roles.keys()]
    if edits.supervised(step) is None and not paired:
        what = '{"chosen_mask": …, "rejected_mask": …}' if step.kind == "preference" else '{"mask": …} or {"labels": …}'
        yield LAW.not_declared("masks", f"roles={what}")
        yield from probe.tried({"more padding": _padding(probe)} if edits.by_attention(step) else {})
        return
    base = probe.off_policy()
    if not probe.gradient(base).finite():
        raise Ends(LAW.not_applicable("masks", "not finite off-policy", "see IG."))
    parts = {"signals where masked": _signals(probe, base), "more padding": _padding(probe)}
    yield from probe.tried(parts if paired else {**parts, MASKED: _masked_row(probe)})


def _signals(probe: Probe, base: edits.Batch) -> Rows:
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
    for role, mask in TEXTS:  # another id wherever the attention mask is 0
        attention, ids = step.value(mask), step.value(role)
        if attention is not None and ids is not None and attention.shape == ids.shape and bool((attention == 0).any()):
            hidden = edits.other_ids(step, ids.clamp_min(0), attention == 0)
            changes[role] = {**base, step.roles[role]: hidden}
    if not changes:
        raise Ends(LAW.not_applicable("signals where masked", "no declared signal is masked"))
    whole = {**base, **{step.roles[r]: b[step.roles[r]] for r, b in changes.items()}}
    together = probe.change(whole, base)
    if together <= probe.tolerance:
        yield probe.same(f"{', '.join(changes)} where masked", together, "")
        return
    for role, batch in changes.items():  # one at a time, to find which
        yield probe.same(
            f"{role} where masked", probe.change(batch, base),
            f"{step.roles[role]!r} enters at masked positions: the mask is not applied to it, does not reach the "
            "model, is shifted by one, or another tensor is used in its place.",
        )  # fmt: skip


def _padding(probe: Probe) -> Rows:
    step = probe.step
    paired = all(s in step.roles for s in edits.SIDES)
    sides = all({f"{s}_mask", f"{s}_attention"} & step.roles.keys() for s in edits.SIDES)
    if not (edits.supervised(step) is not None or sides or edits.by_attention(step)) or (
        step.value("ids") is None and not paired
    ):
        what = 'roles={"chosen_mask": …, "rejected_mask": …}' if paired else 'roles={"ids": …} beside the mask'
        raise Ends(LAW.not_declared("more padding", what))
    if edits.readings(step) == [set()]:
        raise Ends(LAW.not_applicable("more padding", "no tensor is padded, by declaration"))
    for side in ("right", "left"):
        subject = f"3 more columns of padding on the {side}"
        if side == "left" and not _pads_left(probe):
            # A step whose batches have no left padding need not support it: absolute positions may begin at 0.
            raise Ends(LAW.not_applicable(subject, "no row of this batch begins with padding"))
        readings = [partial(_padded, probe, subject, side, keys) for keys in edits.readings(step)]
        if edits.unknown_integers(step):  # what stands in their padding is a guess
            readings.append(partial(_padded, probe, subject, side, edits.readings(step)[0], new=True))
        yield probe.guessed(subject, readings, WIDE)


def _padded(probe: Probe, subject: str, side: str, keys: set[str], new: bool = False) -> Finding:
    return probe.same(
        subject, probe.change(edits.pad(probe.step, side, keys=keys, new=new)),
        "The gradient depends on how far the batch is padded: a mean over positions counts padding, padded positions "
        "are supervised, the mask is shifted by one, or positions are counted from the first padded one.", rows=True,
    )  # fmt: skip


def _pads_left(probe: Probe) -> bool:
    """Whether a row begins with padding, by the attention mask of the ids."""
    pairs = [(probe.step.value(mask), probe.step.value(role)) for role, mask in TEXTS]
    both = [(shown, ids) for shown, ids in pairs if shown is not None and ids is not None]
    return any(shown.shape == ids.shape and bool((shown[:, 0] == 0).any()) for shown, ids in both)


def _masked_row(probe: Probe) -> Rows:
    step, whole = probe.step, probe.gradient()
    if step.rows_interact or step.grouped:
        raise Ends(LAW.not_applicable(MASKED, "rows interact by declaration"))
    least = step.rows / (step.rows + 1)
    with probe.may_refuse(MASKED, "one more row cannot be run"):
        masked = probe.gradient(edits.add_masked_row(step))
    if not masked.finite() and not step.empty_rows:
        raise Ends(LAW.not_applicable(MASKED, "every row has a supervised token, by declaration"))
    if not masked.finite():
        why = "A row without a supervised token gives 0/0; divide by max(count, 1). (Or declare empty_rows=False.)"
        raise Ends(LAW.finding(MASKED, "the gradient is not finite", "finite", False, why))
    factor, rest, holds = probe.scales(masked, whole, least - 0.02, 1.02)
    yield probe.fair(LAW.finding(
        MASKED, f"the gradient is {factor:.3g}× the same up to {rest:.2g}",
        f"1× or {step.rows}/{step.rows + 1}×", holds and min(abs(factor - 1), abs(factor - least)) <= 0.02,
        "A row in which no loss is taken changes the gradient: some part of the loss ignores the mask, or a count has "
        "something of that row.",
    ))  # fmt: skip


LAW = Law("MI", "masks", __doc__, check, perturbed=True)
