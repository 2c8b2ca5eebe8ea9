"""MI: Signals where no loss is taken, ids under padding, more padding and rows without a supervised token do not
matter.

Needs: roles mask or labels, or chosen_mask and rejected_mask; ids and the attention masks for the rest (where no mask
is declared, an attention mask with padding is enough for more padding)
How: Each is changed or added; the gradient must stay the same within the step's own resolution. More padding is judged
in the tensors of wide, or in those that are guessed from their widths. Padding after a row that is attended to may
change the gradient by a factor only, in a model that does not look ahead.
Exceptions: A sequence mean may count a row without supervised tokens: a factor B/(B+1). A pair without any may give
NaN; only what stands in it must not matter. Left padding is added only where the batch has some. Tensors that have the
rows' width by accident (prompts beside completions) are left out by wide; where the guess fails and a narrower one
holds, the row is "not declared". Rewards per token that are 0 where masked may be summed without the mask. A term with
a mask of its own declares it in masks; a score that is read where an answer ends declares chosen_attention and
rejected_attention, and no masks.
Warns: (padding that is attended to) a row that is divided by prompt and answer on purpose, and an undeclared term over
all tokens that are attended to (load balancing).
Detects: verl #2513, #1440 and #6362, TRL #4170, AReaL #1346, a KL barrier that is NaN on an empty mask, answers that
are divided by the length of prompt and answer
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.limits import NEAR
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.verdict import Finding

MASKED, ATTENDED = "a fully masked row", "padding that is attended to"
WIDE = 'wide=("…",), the tensors that are padded with the rows,'
TEXTS = (("ids", "attention"), *((s, f"{s}_attention") for s in edits.SIDES))


def check(probe: Probe) -> Rows:
    step = probe.step
    paired = any(s in step.roles and {f"{s}_mask", f"{s}_attention"} & step.roles.keys() for s in edits.SIDES)
    if edits.supervised(step) is None and not paired:
        what = '{"chosen_mask": …, "rejected_mask": …}' if step.kind == "preference" else '{"mask": …} or {"labels": …}'
        yield LAW.not_declared("masks", f"roles={what}")
        yield from probe.tried({"more padding": _padding(probe)} if edits.by_attention(step) else {})
        return
    base = probe.off_policy()
    LAW.needs(probe.gradient(base).finite(), "masks", "not finite off-policy", "See IG.")
    parts = {"signals where masked": _signals(probe, base), "more padding": _padding(probe)}
    if not paired or all(f"{s}_mask" in step.roles for s in edits.SIDES):
        parts |= {MASKED: _masked_row(probe), ATTENDED: _attended(probe)}
    yield from probe.tried(parts)


def _texts(step: Step) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """The role of ids, the key of their attention mask, and both."""
    for role, mask in TEXTS:
        ids, shown = step.value(role), step.value(mask)
        if ids is not None and shown is not None and ids.shape == shown.shape:
            yield role, step.roles[mask], ids, shown


def _signals(probe: Probe, base: edits.Batch) -> Rows:
    step = probe.step
    changes: dict[str, Tensor] = {}
    for salt, role in enumerate(r for r in edits.PER_TOKEN if r in step.roles):
        if (bounds := edits.bounds(step, role)) is None:
            continue
        key = step.roles[role]
        where = ~bounds[1].expand_as(step.batch[key])
        if role == "rewards":  # may be summed without a mask if they are 0 where masked
            where = where & (step.batch[key] != 0)
        changed = edits.perturb(step, base, role, edits.generator(step, 300 + salt), where=where)[key]
        if not torch.equal(changed, base[key]):
            changes[role] = changed
    for role, _, ids, shown in _texts(step):  # another id wherever the attention mask is 0
        if bool((shown == 0).any()):
            changes[role] = edits.other_ids(step, ids.clamp_min(0), shown == 0)
    LAW.needs(changes, "signals where masked", "no declared signal is masked")
    together = probe.change({**base, **{step.roles[role]: changed for role, changed in changes.items()}}, base)
    if together <= probe.tolerance:
        yield probe.same(f"{', '.join(changes)} where masked", together, "")
        return
    for role, changed in changes.items():  # one at a time, to find which
        yield probe.same(
            f"{role} where masked", probe.change({**base, step.roles[role]: changed}, base),
            f"{step.roles[role]!r} enters where it is masked: the mask is not applied to it, does not reach the model, "
            "is shifted by one, or is another tensor's.",
        )  # fmt: skip


def _padding(probe: Probe) -> Rows:
    step = probe.step
    if step.value("ids") is None and not {*edits.SIDES} <= step.roles.keys():
        raise Ends(LAW.not_declared("more padding", 'roles={"ids": …} beside the mask'))
    LAW.needs(edits.readings(step) != [set()], "more padding", "no tensor is padded, by declaration")
    left = any(bool((shown[:, 0] == 0).any()) for *_, shown in _texts(step))
    for side in ("right", "left"):
        subject = f"3 more columns of padding on the {side}"
        # A step whose batches have no left padding need not support it: absolute positions may begin at 0.
        LAW.needs(side == "right" or left, subject, "no row of this batch begins with padding")
        readings = [partial(_padded, probe, subject, side, keys) for keys in edits.readings(step)]
        if edits.unknown_integers(step):  # what stands in their padding is a guess
            readings.append(partial(_padded, probe, subject, side, edits.readings(step)[0], new=True))
        yield probe.guessed(subject, readings, WIDE)


def _padded(probe: Probe, subject: str, side: str, keys: set[str], new: bool = False) -> Finding:
    return probe.same(
        subject, probe.change(edits.pad(probe.step, side, keys=keys, new=new)),
        "The gradient depends on padding: a mean counts it, it is supervised, the mask is shifted by one, or positions "
        "are counted from the first padded one. Where rows are never padded, declare wide=().", rows=True,
    )  # fmt: skip


def _attended(probe: Probe) -> Rows:
    """Padding after a row's end is attended to: in a causal model that can only change what the row is divided by."""
    step, shown, other = probe.step, edits.Batch(), edits.Batch()
    for role, mask, ids, old in _texts(step):
        after = (old != 0).flip(-1).cumsum(-1).flip(-1) == 0
        shown[mask] = torch.where(after, torch.ones_like(old), old)
        other[step.roles[role]] = edits.other_ids(step, ids.clamp_min(0), after)
    ragged = any(not torch.equal(mask, step.batch[key]) for key, mask in shown.items())
    LAW.needs(ragged and not step.rows_interact, ATTENDED, "no row ends with padding, or rows interact by declaration")
    LAW.needs(probe.afford(2, keep=12.0), ATTENDED, "not checked: the budget is spent")
    with probe.may_refuse(ATTENDED):
        found = probe.gradient({**step.batch, **shown})
    # Of a model that scales something by a row's length (NEFTune's noise) a little more changes.
    factor, rest, _ = probe.scales(found, probe.gradient(), 0.0, 1.0)
    holds = rest <= (limit := max(NEAR, probe.tolerance))
    causal = holds or found.distance(probe.gradient({**step.batch, **shown, **other})) <= probe.tolerance
    LAW.needs(causal, ATTENDED, "the model attends to later tokens")
    yield LAW.doubtful(probe.fair(LAW.finding(
        ATTENDED, f"the gradient is {factor:.3g}× the same up to {rest:.2g}", f"up to {limit:.2g}", holds,
        "Unsupervised tokens after an answer change its weight: it is divided by the row's length, prompt or tool "
        "output included, and not by its number of supervised tokens.",
    )))  # fmt: skip


def _masked_row(probe: Probe) -> Rows:
    step = probe.step
    LAW.needs(not (step.rows_interact or step.grouped), MASKED, "rows interact by declaration")
    least = step.rows / (step.rows + 1)
    with probe.may_refuse(MASKED, "one more row cannot be run"):
        masked = probe.gradient(edits.add_masked_row(step))
    if "chosen_mask" in step.roles:  # terms of a pair's loss are divided by counts of their own, so contents differ
        other = probe.gradient(edits.add_masked_row(step, least=True))
        LAW.needs(masked.finite() and other.finite(), MASKED, "a pair without a token has no finite gradient")
        raise Ends(probe.same(
            MASKED, masked.distance(other),
            "The content of a pair whose masks are all 0 matters: a part of the loss ignores them.", rows=True,
        ))  # fmt: skip
    LAW.needs(masked.finite() or step.empty_rows, MASKED, "every row has a supervised token, by declaration")
    if not masked.finite():
        why = "A row without a supervised token gives 0/0; divide by max(count, 1). (Or declare empty_rows=False.)"
        raise Ends(LAW.finding(MASKED, "the gradient is not finite", "finite", False, why))
    factor, rest, holds = probe.scales(masked, probe.gradient(), least - 0.02, 1.02)
    yield probe.fair(LAW.finding(
        MASKED, f"the gradient is {factor:.3g}× the same up to {rest:.2g}",
        f"1× or {step.rows}/{step.rows + 1}×", holds and min(abs(factor - 1), abs(factor - least)) <= 0.02,
        "A row in which no loss is taken changes the gradient: a part of the loss, or a count, ignores the mask. Where "
        "rows are coupled on purpose (a whitening), declare rows_interact=True.",
    ))  # fmt: skip


LAW = Law("MI", "masks", __doc__, check, perturbed=True)
