"""MI-PACKED: Documents in one packed row are independent: ids and signals of the others do not matter, the gradient of
a later document equals its gradient when it is alone in the row, and its first token is not a target.

other documents     every second document of a row is supervised: ids and signals of the others do not matter
sums along the row  tokens of one document and rewards, values or returns of the next: their effects add up
alone               a later document without what precedes it has the same gradient (positions begin again)
first tokens        a document's first token is not predicted from the document before it

Needs: roles documents and ids beside mask or labels; positions, where the batch has them
How: Every second document is supervised while the others are changed; tokens of one and signals of the next are
changed; what precedes a later one is cut off; only first tokens are supervised.
Exceptions: Rotary positions may run on, since only distances matter; so gradients are compared, not ids. A first token
that all documents share (BOS after EOS) may be supervised. Batches with cu_seqlens cannot be cut.
Detects: TRL #4170, torchtitan #4075, nanoVLM #201, GAE that runs on across packed documents
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.laws.masks import WIDE
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.verdict import Finding

PACKED, ALONE, FIRST = "another document in the packed row", "a later document alone", "documents' first tokens"
SUMS = "sums along the packed row"


def declared(step: Step) -> bool:
    return None not in (step.value("documents"), step.value("ids"), edits.supervised(step))


def check(probe: Probe) -> Rows:
    step = probe.step
    documents, ids, on = step.batch[step.roles["documents"]], step.batch[step.roles["ids"]], edits.supervised_wide(step)
    if on is None or documents.shape != ids.shape:
        raise Ends(LAW.not_applicable(PACKED, f"documents {tuple(documents.shape)}, ids and the mask do not fit"))
    begins = edits.begins(documents)
    if not bool(begins.any()):
        raise Ends(LAW.not_applicable(PACKED, "every row is one document"))
    yield from probe.tried({
        PACKED: _others(probe, begins, on), SUMS: _sums(probe, begins), ALONE: _alone(probe, begins, on),
        FIRST: _first(probe, begins, on),
    })  # fmt: skip


def _others(probe: Probe, begins: Tensor, on: Tensor) -> Rows:
    """Every second document of a row is supervised, and the others are changed. Attention leaks forwards only; returns
    that are summed from the end leak backwards, so where there are signals the others are supervised, too."""
    step, number = probe.step, begins.long().cumsum(-1)
    # A document's first token is predicted from another document's last: edges are not supervised.
    edges = begins if edits.in_place(step) else begins | begins.roll(1, dims=-1) | begins.roll(-1, dims=-1)
    inside = on & ~edges & (number[:, -1:] > 0)
    signals = [r for r in edits.PER_TOKEN if r in step.roles and edits.fitting(step, r) is not None]
    key, changes = step.roles["ids"], list[float]()
    ids: Tensor = step.batch[key]
    for turn in (1, 0):
        batch, others = edits.only(step, step.batch, inside & (number % 2 == turn)), number % 2 != turn
        if changes and not signals:
            break
        before = probe.gradient(batch)
        if before.norm() > 0:
            changed = {**batch, key: edits.other_ids(step, ids, others & (ids >= 0))}
            changes.append(before.distance(probe.gradient(_signals(probe, changed, others, signals))))
    if not changes:
        raise Ends(LAW.not_applicable(PACKED, "no loss is taken inside a document that shares its row"))
    yield probe.same(
        PACKED, max(changes),
        "Documents of one packed row depend on each other. Either attention does not know the packing (position ids, "
        "cu_seqlens; an all-ones mask may switch its detection off), or a signal is summed along the whole row.",
    )  # fmt: skip


def _sums(probe: Probe, begins: Tensor) -> Rows:
    """Other tokens in every second document, other signals in the rest, and both: where documents do not reach into
    each other, the two effects add up. (A mask that silences one of them would hide a sum that heeds the mask.)"""
    step = probe.step
    summed = [r for r in ("rewards", "values", "returns") if edits.fitting(step, r) is not None]
    if not summed or step.rows_interact or "group" in step.roles:
        return
    second = begins.long().cumsum(-1) % 2 == 1
    edges = begins | begins.roll(-1, dims=-1)
    key = step.roles["ids"]
    ids: Tensor = step.batch[key]
    tokens = edits.other_ids(step, ids, ~second & ~edges & (ids >= 0))
    other = _signals(probe, dict(step.batch), second, summed)
    here, there = probe.gradient(), probe.gradient(other)
    mine, both = probe.gradient({**step.batch, key: tokens}), probe.gradient({**other, key: tokens})
    size = max(g.norm() for g in (here, there, mine, both))
    rest = both.minus(mine).minus(there).plus(here).norm() / size if size > 0 else 0.0
    yield probe.same(
        SUMS, rest,
        f"A token's gradient depends on {' and '.join(summed)} of another document of its row: returns or advantages "
        "are summed along the row and do not stop where a document ends.", what="what both change is off its sum by {}",
    )  # fmt: skip


def _signals(probe: Probe, batch: edits.Batch, where: Tensor, roles: list[str]) -> edits.Batch:
    """Other signals there; rewards only where there are some, since they may be summed without a mask."""
    step = probe.step
    for salt, role in enumerate(roles):
        old: Tensor = step.batch[step.roles[role]]
        fitting = edits.fit(where, old)
        assert fitting is not None
        there = fitting.expand_as(old) & (old != 0) if role == "rewards" else fitting.expand_as(old)
        batch = edits.perturb(step, batch, role, edits.generator(step, 700 + salt), where=there)
    return batch


def _alone(probe: Probe, begins: Tensor, on: Tensor) -> Rows:
    """A row that begins with its second document. Loss values first; gradients where these differ."""
    step, places = probe.step, torch.arange(begins.shape[1], device=begins.device)
    inside_later = on & (begins.long().cumsum(-1) > 0) & ~begins
    rows = inside_later.any(-1).nonzero()[:, 0].tolist()
    why = "rows interact by declaration" if step.rows_interact else _other_shapes(probe)
    if why is not None or not rows:
        raise Ends(LAW.not_applicable(ALONE, why or "no loss is taken inside a later document"))
    start = int(begins[rows[0]].long().argmax())
    row = edits.only(step, edits.take_rows(step, torch.tensor(rows[:1])), (places > start)[None])

    def cut(keys: set[str]) -> Finding:
        alone = {k: v[:, start:] if k in keys else v for k, v in row.items()}
        if "positions" in step.roles:  # alone, a document begins at 0
            alone[step.roles["positions"]] = alone[step.roles["positions"]] - alone[step.roles["positions"]][:, :1]
        return probe.same(
            ALONE, _difference(probe, row, alone),
            "A document has another gradient after another one than alone: its positions run on instead of restarting "
            "at 0, or it attends to what precedes it.", what="differs from it in its packed row by {}",
        )  # fmt: skip

    yield probe.guessed(ALONE, (partial(cut, keys) for keys in edits.readings(step)), WIDE)


def _difference(probe: Probe, a: edits.Batch, b: edits.Batch) -> float:
    step, quiet = probe.step, probe.step.terms_off
    if step.value_is_loss or (step.value_is_loss is None and step.kind != "policy gradient"):
        here, there = (probe.look(batch, quiet).loss for batch in (a, b))
        if here != 0 and abs(here - there) <= probe.value_room * max(abs(here), abs(there)):
            return abs(here - there) / abs(here)
    mine, theirs = probe.gradient(a, quiet), probe.gradient(b, quiet)
    # A constant factor is the width's, by which some divide.
    return mine.distance(theirs.times(mine.best_scale(theirs)))


def _other_shapes(probe: Probe) -> str | None:
    """A tensor that gives document boundaries in another form (cu_seqlens) and cannot be cut with the columns."""
    step = probe.step
    wide = set().union(*edits.readings(step))
    for key, value in step.batch.items():
        if isinstance(value, Tensor) and value.ndim > 0 and key not in wide and tuple(value.shape) != (step.rows,):
            return f"{key!r} {tuple(value.shape)} cannot be cut with the columns"
    return None


def _first(probe: Probe, begins: Tensor, on: Tensor) -> Rows:
    """Only documents' first tokens are supervised, where the batch supervises them: they must have no effect."""
    step = probe.step
    ids, labels, mask = step.value("ids"), step.value("labels"), step.value("mask")
    assert ids is not None
    ahead = edits.ahead(step)
    if not (ahead or edits.in_place(step) or (labels is None and mask is not None and mask.shape[1] < ids.shape[1])):
        raise Ends(LAW.not_applicable(FIRST, "it is not known which label belongs to which token"))
    where = begins.roll(-1, dims=-1) if ahead else begins
    keep = on & where
    shown = ids[begins & (keep.roll(1, dims=-1) if ahead else keep)].unique()
    if len(shown) < 2:
        # The same token begins every document: learning that it follows an end is harmless, and often intended.
        what = "none is supervised" if len(shown) == 0 else "all documents begin with the same token"
        raise Ends(LAW.finding(FIRST, what, "no gradient", True if len(shown) == 0 else "not applicable"))
    batch, quiet, pull = edits.only(step, step.batch, keep), step.terms_off, 0.0
    value = probe.look(batch, quiet).loss
    if math.isfinite(value) and value != 0:
        there = probe.gradient(batch, quiet)
        other = {**batch, step.roles["ids"]: edits.other_ids(step, ids, begins)}
        if labels is not None:
            other[step.roles["labels"]] = edits.other_ids(step, batch[step.roles["labels"]], keep)
        pull = there.distance(probe.gradient(other, quiet)) if there.finite() else 0.0
    yield probe.same(
        FIRST, pull,
        f"The first tokens of {int(keep.sum())} packed documents are predicted from the end of another document: set "
        f"their labels to {step.ignore_index}, as collators for packed rows do.",
        what="as targets they moved the gradient by {}",
    )  # fmt: skip


LAW = Law("MI-PACKED", "packed documents", __doc__, check, perturbed=True, asks=(
    (PACKED, 'roles={"ids": …, "documents": …}, where rows are packed,', declared),
))  # fmt: skip
