"""MI-PACKED: Documents in one packed row are independent: ids and signals of the others do not matter, the gradient of
a later document equals its gradient when it is alone in the row, and its first token is not a target.

other documents     one document of a row is supervised: ids and signals of the others do not matter
sums along the row  tokens of one document and rewards, values or returns of the next: their effects add up
alone               a later document without what precedes it has the same gradient (positions begin again)
first tokens        a document's first token is not predicted from the document before it

Needs: roles documents and ids beside mask or labels; positions, where the batch has them
How: One document is supervised while the others are changed; tokens of one and signals of the next are changed; what
precedes a later one is cut off; only first tokens are supervised.
Exceptions: Rotary positions may run on, since only distances matter; so gradients are compared, not ids. A first token
that all documents share (BOS after EOS) may be supervised. Batches with cu_seqlens cannot be cut.
Detects: TRL #4170, torchtitan #4075, nanoVLM #201, GAE that runs on across packed documents
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from earnest.audit import edits
from earnest.audit.law import Law
from earnest.audit.probe import Probe
from earnest.audit.verdict import Finding

PACKED, ALONE, FIRST = "another document in the packed row", "a later document alone", "documents' first tokens"
SUMS = "sums along the packed row"


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    documents, ids, on = step.value("documents"), step.value("ids"), edits.supervised(step)
    if documents is None or ids is None or on is None:
        yield LAW.not_declared(PACKED, 'roles={"ids": …, "documents": …}, where rows are packed,')
        return
    if documents.shape != ids.shape or on.shape[0] != ids.shape[0] or ids.shape[1] - on.shape[1] not in (0, 1):
        why = f"documents {tuple(documents.shape)}, ids {tuple(ids.shape)} and the mask {tuple(on.shape)} do not fit"
        yield LAW.not_applicable(PACKED, why)
        return
    begins = edits.begins(documents)
    if not bool(begins.any()):
        yield LAW.not_applicable(PACKED, "every row is one document")
        return
    with probe.perturbed():
        parts = {
            PACKED: _others(probe, begins),
            SUMS: _sums(probe, begins),
            ALONE: _alone(probe, begins),
            FIRST: _first(probe, begins),
        }
        for subject, part in parts.items():
            try:
                yield from part
            except Exception as error:
                yield LAW.unchecked(subject, error)


def _whole(probe: Probe) -> Tensor:
    """Where the loss is taken, in the ids' width; what is one narrower is aligned with the shifted targets."""
    on, ids = edits.supervised(probe.step), probe.step.value("ids")
    assert on is not None and ids is not None
    on = on if on.ndim == 2 else on.flatten(2).any(-1)
    return torch.nn.functional.pad(on, (ids.shape[1] - on.shape[1], 0))


def _others(probe: Probe, begins: Tensor) -> Iterator[Finding]:
    step = probe.step
    number = begins.long().cumsum(-1)
    # A document's first token is predicted from another document's last: edges are not supervised.
    edges = begins if edits.in_place(step) else begins | begins.roll(1, dims=-1) | begins.roll(-1, dims=-1)
    inside = _whole(probe) & ~edges
    signals = [r for r in edits.PER_TOKEN if r in step.roles and edits.fitting(step, r) is not None]
    first = _supervised_documents(number, inside, 0)
    if first is None:
        yield LAW.not_applicable(PACKED, "no loss is taken inside a document that shares its row")
        return
    passes = [first]
    behind = any(doc < int(number[row, -1]) for row, doc in first.items())
    if signals and not behind and (second := _supervised_documents(number, inside, 1)) is not None:
        passes.append(second)  # attention leaks forwards only; returns that are summed from the end leak backwards
    change, supervised = 0.0, False
    for chosen in passes:
        doc = torch.full((len(number), 1), -1, device=number.device, dtype=number.dtype)
        for row, chosen_one in chosen.items():
            doc[row] = chosen_one
        batch = edits.only(step, step.batch, inside & (number == doc))
        before = probe.gradient(batch)
        if before.norm() > 0:
            supervised = True
            change = max(change, before.distance(probe.gradient(_changed(probe, batch, number != doc, signals))))
    if not supervised:
        yield LAW.not_applicable(PACKED, "no loss is taken inside a document that shares its row")
        return
    yield LAW.finding(
        PACKED, f"moved the gradient by {change:.2g}", f"≤ {probe.tolerance:.1g}", change <= probe.tolerance,
        "Documents of one packed row depend on each other. Either attention does not know the packing (position ids, "
        "cu_seqlens; an all-ones mask may switch its detection off), or a signal is summed along the whole row.",
    )  # fmt: skip


def _supervised_documents(number: Tensor, inside: Tensor, turn: int) -> dict[int, int] | None:
    """For every packed row the document that is supervised: one in the middle, or by turns the last and the first."""
    chosen: dict[int, int] = {}
    for row in range(len(number)):
        last, taken = int(number[row, -1]), number[row][inside[row]].unique().tolist()
        if last == 0 or not taken:
            continue
        middle = [d for d in taken if 0 < d < last]
        chosen[row] = middle[len(middle) // 2] if middle else taken[-1 if turn % 2 == 0 else 0]
        turn += 0 if middle else 1
    return chosen or None


def _changed(probe: Probe, batch: edits.Batch, where: Tensor, signals: list[str]) -> edits.Batch:
    """Other ids and other signals there."""
    key = probe.step.roles["ids"]
    ids: Tensor = probe.step.batch[key]
    return _signals(probe, {**batch, key: edits.other_ids(probe.step, ids, where & (ids >= 0))}, where, signals)


def _sums(probe: Probe, begins: Tensor) -> Iterator[Finding]:
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
    yield LAW.finding(
        SUMS, f"what both change is off its sum by {rest:.2g}", f"≤ {probe.tolerance:.1g}", rest <= probe.tolerance,
        f"A token's gradient depends on {' and '.join(summed)} of another document of its row: returns or advantages "
        "are summed along the row and do not stop where a document ends.",
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


def _alone(probe: Probe, begins: Tensor) -> Iterator[Finding]:
    """A row that begins with its second document. Loss values first; gradients where these differ."""
    step = probe.step
    if step.rows_interact:
        yield LAW.not_applicable(ALONE, "rows interact by declaration")
        return
    if (why := _other_shapes(probe)) is not None:
        yield LAW.not_applicable(ALONE, why)
        return
    places = torch.arange(begins.shape[1], device=begins.device)
    inside_later = _whole(probe) & (begins.long().cumsum(-1) > 0) & ~begins
    rows = inside_later.any(-1).nonzero()[:, 0].tolist()
    if not rows:
        yield LAW.not_applicable(ALONE, "no loss is taken inside a later document")
        return
    start, quiet = int(begins[rows[0]].long().argmax()), probe.step.terms_off
    row = edits.take_rows(step, torch.tensor(rows[:1]))
    row = edits.only(step, row, (places > start)[None])
    off = math.inf
    for keys in edits.readings(step):
        cut = {k: v[:, start:] if k in keys else v for k, v in row.items()}
        if "positions" in step.roles:  # alone, a document begins at 0
            cut[step.roles["positions"]] = cut[step.roles["positions"]] - cut[step.roles["positions"]][:, :1]
        try:
            off = min(off, _difference(probe, row, cut, quiet))
        except Exception as error:
            yield LAW.not_applicable(ALONE, f"cannot be run ({type(error).__name__})", str(error)[:120])
            return
        if off <= probe.tolerance:
            break
    yield LAW.finding(
        ALONE, f"differs from it in its packed row by {off:.2g}", f"≤ {probe.tolerance:.1g}", off <= probe.tolerance,
        "A document has another gradient after another one than alone: its positions run on instead of restarting "
        "at 0, or it attends to what precedes it.",
    )  # fmt: skip


def _difference(probe: Probe, a: edits.Batch, b: edits.Batch, quiet: dict[str, object]) -> float:
    step = probe.step
    if step.value_is_loss or (step.value_is_loss is None and step.kind != "policy gradient"):
        here, there = (probe.look(batch, quiet).loss for batch in (a, b))
        if here != 0 and abs(here - there) <= value_room(probe) * max(abs(here), abs(there)):
            return abs(here - there) / abs(here)
    mine, theirs = probe.gradient(a, quiet), probe.gradient(b, quiet)
    # A constant factor is the width's, by which some divide.
    return mine.distance(theirs.times(mine.best_scale(theirs)))


def value_room(probe: Probe) -> float:
    """The relative difference up to which two loss values count as equal, without comparing gradients: a mean over
    tokens is more exact than a gradient."""
    return min(probe.tolerance, (1 if probe.coarse else 16) * probe.coarsest)


def _other_shapes(probe: Probe) -> str | None:
    """A tensor that gives document boundaries in another form (cu_seqlens) and cannot be cut with the columns."""
    step = probe.step
    wide = set().union(*edits.readings(step))
    for key, value in step.batch.items():
        if isinstance(value, Tensor) and value.ndim > 0 and key not in wide and tuple(value.shape) != (step.rows,):
            return f"{key!r} {tuple(value.shape)} cannot be cut with the columns"
    return None


def _first(probe: Probe, begins: Tensor) -> Iterator[Finding]:
    """Only documents' first tokens are supervised, where the batch supervises them: they must have no effect."""
    step = probe.step
    ids, labels, mask = step.value("ids"), step.value("labels"), step.value("mask")
    assert ids is not None
    ahead = edits.ahead(step)
    if not (ahead or edits.in_place(step) or (labels is None and mask is not None and mask.shape[1] < ids.shape[1])):
        yield LAW.not_applicable(FIRST, "it is not known which label belongs to which token")
        return
    where = begins.roll(-1, dims=-1) if ahead else begins
    keep = _whole(probe) & where
    shown = ids[begins & (keep.roll(1, dims=-1) if ahead else keep)].unique()
    if len(shown) < 2:
        # The same token begins every document: learning that it follows an end is harmless, and often intended.
        what = "none is supervised" if len(shown) == 0 else "all documents begin with the same token"
        yield LAW.finding(FIRST, what, "no gradient", True if len(shown) == 0 else "not applicable")
        return
    batch, quiet = edits.only(step, step.batch, keep), probe.step.terms_off
    pull = 0.0
    value = probe.look(batch, quiet).loss
    if math.isfinite(value) and value != 0:
        there = probe.gradient(batch, quiet)
        other = {**batch, step.roles["ids"]: edits.other_ids(step, ids, begins)}
        if labels is not None:
            other[step.roles["labels"]] = edits.other_ids(step, batch[step.roles["labels"]], keep)
        pull = there.distance(probe.gradient(other, quiet)) if there.finite() else 0.0
    yield LAW.finding(
        FIRST, f"as targets they moved the gradient by {pull:.2g}", f"≤ {probe.tolerance:.1g}", pull <= probe.tolerance,
        f"The first tokens of {int(keep.sum())} packed documents are predicted from the end of another document: set "
        "their labels to -100, as collators for packed rows do.",
    )  # fmt: skip


LAW = Law.of("MI-PACKED", "packed documents", __doc__, check)
