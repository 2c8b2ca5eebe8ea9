"""MI: what is masked does not matter: signals where no loss is taken, padded ids, more padding, silent rows, other
documents."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from earnest.audit import edits
from earnest.audit.gradient import Gradient
from earnest.audit.law import Law, not_declared
from earnest.audit.probe import Probe
from earnest.audit.verdict import Finding, unchecked

PACKED = "another document in the packed row"


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    on = edits.supervised(step)
    if on is None:
        yield not_declared("MI", "masks", 'roles={"mask": …} or {"labels": …}')
        return
    with probe.kicked():
        base = probe.off_policy()
        origin = probe.gradient(base)
        if not origin.finite():
            yield Finding("MI", "masks", "not finite off-policy", "-", "not applicable", "IG says more.")
            return
        parts = {
            "signals where masked": _signals(probe, base, origin),
            "more padding": _padding(probe),
            "a fully masked row": _silent_row(probe),
            PACKED: _documents(probe),
        }
        for subject, part in parts.items():
            try:
                yield from part
            except Exception as error:
                yield unchecked("MI", subject, error)


def _signals(probe: Probe, base: edits.Batch, origin: Gradient) -> Iterator[Finding]:
    """Every per-token signal at once; where that matters, one at a time, to name the culprit."""
    step = probe.step
    changes: dict[str, edits.Batch] = {}
    for salt, role in enumerate(r for r in edits.PER_TOKEN if r in step.roles):
        fitting = edits.fitting(step, role)
        if fitting is None or bool(fitting.all()):
            continue
        where = ~fitting.expand_as(step.batch[step.roles[role]])
        changes[role] = edits.perturb(step, base, role, edits.generator(step, 300 + salt), where=where)
    if (hidden := _under_padding(probe, base)) is not None:
        changes["ids"] = hidden
    if not changes:
        yield Finding("MI", "signals where masked", "nothing that is declared is masked", "-", "not applicable")
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
            "model, is shifted by one, or another tensor stands in its place.",
        )


def _must_not_matter(probe: Probe, subject: str, change: float, meaning: str) -> Finding:
    return LAW.finding(
        subject, f"moved the gradient by {change:.2g}", f"≤ {probe.tolerance:.1g}", change <= probe.tolerance, meaning
    )


def _under_padding(probe: Probe, batch: edits.Batch) -> edits.Batch | None:
    """Other ids where the attention mask is 0."""
    step = probe.step
    attention, ids = step.value("attention"), step.value("ids")
    if attention is None or ids is None or bool((attention != 0).all()) or attention.shape != ids.shape:
        return None
    other = ids.roll(1, dims=-1).clamp_min(0)
    return {**batch, step.roles["ids"]: torch.where(attention != 0, ids, other)}


def _padding(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    if step.value("ids") is None or (step.value("mask") is None and step.value("labels") is None):
        yield not_declared("MI", "more padding", 'roles={"ids": …} beside the mask')
        return
    for side in ("right", "left"):
        subject = f"3 more columns of padding on the {side}"
        if side == "left" and not _pads_left(probe):
            # A step that never sees left padding owes it nothing: absolute positions may well begin at 0.
            yield Finding("MI", subject, "no row of this batch begins with padding", "-", "not applicable")
            return
        try:
            padded = probe.gradient(edits.pad(step, side))
        except Exception as error:
            yield Finding(
                "MI", subject, f"cannot be run ({type(error).__name__})", "-", "not applicable", str(error)[:120]
            )
            return
        yield probe.fair(_must_not_matter(
            probe, subject, probe.gradient().distance(padded),
            "The length to which a batch happens to be padded changes what is learned: a mean over positions counts "
            "padding, padded positions are supervised, or positions are counted from the padding's first.",
        ))  # fmt: skip


def _pads_left(probe: Probe) -> bool:
    shown = probe.step.value("attention")
    return shown is not None and shown.ndim == 2 and bool((shown[:, 0] == 0).any())


def _silent_row(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    if step.rows_interact or "group" in step.roles or "rewards" in step.roles:
        yield Finding("MI", "a fully masked row", "rows interact by declaration", "-", "not applicable")
        return
    whole = probe.gradient()
    try:
        silent = probe.gradient(edits.add_silent_row(step))
    except Exception as error:
        why = f"one more row cannot be run ({type(error).__name__})"
        needs = "The loss needs its rows together (fixed group or pair sizes)."
        yield Finding("MI", "a fully masked row", why, "-", "not applicable", needs)
        return
    if not silent.finite():
        yield LAW.finding(
            "a fully masked row", "the gradient is not finite", "finite", False,
            "A row without a single supervised token gives 0/0; divide by max(count, 1).",
        )  # fmt: skip
        return
    factor = silent.best_scale(whole)
    rest = silent.distance(whole.times(factor))
    yield probe.fair(LAW.finding(
        "a fully masked row",
        f"the gradient is {factor:.3g}× the same up to {rest:.2g}",
        f"the same direction, {step.rows}/{step.rows + 1} ≤ factor ≤ 1",
        rest <= probe.tolerance and step.rows / (step.rows + 1) - 0.02 <= factor <= 1.02,
        "A row in which no loss is taken still changes the gradient's direction: some part of the loss does not see "
        "the mask.",
    ))  # fmt: skip


def _documents(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    documents, ids = step.value("documents"), step.value("ids")
    if documents is None or ids is None:
        yield not_declared("MI", PACKED, 'roles={"ids": …, "documents": …}, where rows are packed,')
        return
    first: Tensor = documents == documents[:, :1]
    if bool(first.all()):
        yield Finding("MI", PACKED, "every row is one document", "-", "not applicable")
        return
    # Take the loss inside the later documents only: a document's first token is predicted from the one before it.
    edge = documents != documents.roll(1, dims=-1)
    quiet = first | edge | edge.roll(1, dims=-1)
    batch: edits.Batch = dict(step.batch)
    for role, silence in (("mask", 0), ("labels", -100)):
        if role in step.roles:
            old = batch[step.roles[role]]
            batch[step.roles[role]] = torch.where(quiet[:, -old.shape[1] :], torch.full_like(old, silence), old)
    before = probe.gradient(batch)
    if before.norm() == 0:
        yield Finding("MI", PACKED, "no loss is taken inside a later document", "-", "not applicable")
        return
    changed = {**batch, step.roles["ids"]: torch.where(first, ids.roll(1, dims=-1).clamp_min(0), ids)}
    yield _must_not_matter(
        probe, PACKED, before.distance(probe.gradient(changed)),
        "Documents of one packed row attend to each other: the packing is not told to the attention (position ids, "
        "cu_seqlens), or an all-ones mask switched its detection off.",
    )  # fmt: skip


LAW = Law(
    code="MI",
    name="masks",
    sentence="Signals where no loss is taken, ids under padding, more padding, silent rows and other documents do "
    "not matter.",
    needs="roles mask or labels; ids, attention, documents for the rest",
    how="Each is changed or added, and the gradient must stay within the step's own resolution.",
    traps="Prompt tokens do matter, through attention. A sequence mean may count a silent row, so a factor B/(B+1) "
    "is allowed. Padding is added on the left only where the batch has some there.",
    caught="verl #2513 and #1440, TRL #4170, a KL barrier that is NaN on an empty mask",
    check=check,
)
