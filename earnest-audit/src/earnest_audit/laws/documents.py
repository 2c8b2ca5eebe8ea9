"""MI-PACKED: Documents in one packed row are independent: ids and signals of the others do not matter, and a document's
first token is not a target.

other documents     g(a, b) - g(a', b) = g(a, b') - g(a', b') of ids and signals a of one document and b of the next
first tokens        a document's first token is not predicted from the document before it
positions           a document's positions begin again, or only their distances matter

Needs: roles documents and ids; mask or labels where the batch has them; positions
How: Ids and signals of every second document, of the others, and of both are changed; then only first tokens are
supervised; then positions are counted from each document's start.
Exceptions: A first token that all documents share (BOS after EOS) may be supervised. A term that couples the tokens of
a row (a balance loss) is declared with its weight, or rows_interact=True, where there are several rows.
Detects: TRL #4170, torchtitan #4075, nanoVLM #201, torchtune #2613, GAE that runs on across packed documents
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.probe import Probe

PACKED, FIRST = "another document in the packed row", "documents' first tokens"
AGAIN = "positions that begin again"


def check(probe: Probe) -> Rows:
    step = probe.step
    documents, ids, on = step.batch[step.roles["documents"]], step.batch[step.roles["ids"]], edits.supervised_wide(step)
    fit = documents.shape == ids.shape and (on is not None or edits.supervised(step) is None)
    LAW.needs(fit, PACKED, f"documents {tuple(documents.shape)}, ids and the mask do not fit")
    begins = edits.begins(documents)
    LAW.needs(begins.any(), PACKED, "every row is one document")
    parts = {PACKED: _additive(probe, begins, ids, on), AGAIN: _again(probe, begins)}
    yield from probe.tried(parts if on is None else {**parts, FIRST: _first(probe, begins, on)})


def _again(probe: Probe, begins: Tensor) -> Rows:
    """Where positions run on through a row, they matter only as distances (rotary embeddings)."""
    positions = probe.step.value("positions")
    if positions is None or positions.shape != begins.shape:
        return
    starts = torch.where(begins, torch.arange(begins.shape[1], device=begins.device), 0).cummax(-1).values
    again = positions - positions.gather(-1, starts) + positions[:, :1]
    yield probe.same(
        AGAIN, probe.change({**probe.step.batch, probe.step.roles["positions"]: again}),
        "Positions run on from the document before, and the model reads them as absolute: let them begin again.",
        what="counted from each document's start, they moved the gradient by {}",
    )  # fmt: skip


def _additive(probe: Probe, begins: Tensor, ids: Tensor, on: Tensor | None) -> Rows:
    """g(a, b) - g(a', b) = g(a, b') - g(a', b'), a and b being every second document and the others. No mask is
    changed: a sum that skips masked tokens carries on behind them. First and last tokens stay where they are no targets
    of another document, or where all documents have the same (BOS, EOS)."""
    step, odd, free = probe.step, begins.long().cumsum(-1) % 2 == 1, ids >= 0
    batches: list[Mapping[str, Any]] = [step.batch]
    signals = [r for r in edits.PER_TOKEN if edits.fit(edits.supervised(step), step.value(r)) is not None]
    for edge in (begins, begins.roll(-1, dims=-1)):
        if on is not None or len(ids[edge].unique()) == 1:
            free &= ~edge
    for where in (odd, ~odd, torch.ones_like(odd)):
        batch = {**step.batch, step.roles["ids"]: edits.other_ids(step, ids, where & free)}
        for salt, role in enumerate(signals):
            there = edits.fit(where, old := step.batch[step.roles[role]])
            assert there is not None  # rewards only where there are some: they may be summed without a mask
            there = there.expand_as(old) & ((old != 0) | (role != "rewards"))
            batch = edits.perturb(step, batch, role, edits.generator(step, 700 + salt), where=there)
        batches.append(batch)
    whole, first, second, both = (probe.gradient(batch, probe.quiet) for batch in batches)
    coupled = (step.rows_interact and step.rows > 1) or step.drops_tokens or "group" in step.roles
    moves = min(map(whole.distance, (first, second))) > probe.tolerance
    LAW.needs(moves and not coupled, PACKED, "tokens interact by declaration, or what is changed does not matter")
    left = whole.minus(first).minus(second.minus(both)).norm() / max(g.norm() for g in (whole, first, second, both))
    yield probe.same(
        PACKED, left,
        "One document depends on another of its row: attention ignores the packing, labels are shifted or a mean is "
        "taken over the whole row, or returns run on. (Whitened over the batch on purpose: rows_interact=True.)",
        rows=True, what=f"{', '.join(['ids', *signals])} of one move the others' part by {{}} of the gradient",
    )  # fmt: skip


def _first(probe: Probe, begins: Tensor, on: Tensor) -> Rows:
    """Only documents' first tokens are supervised, where the batch supervises them: they have no gradient."""
    step = probe.step
    ids, labels, mask = step.value("ids"), step.value("labels"), step.value("mask")
    assert ids is not None
    ahead = edits.ahead(step)
    known = ahead or edits.in_place(step) or (labels is None and mask is not None and mask.shape[1] < ids.shape[1])
    LAW.needs(known, FIRST, "it is not known which label belongs to which token")
    keep = on & (begins.roll(-1, dims=-1) if ahead else begins)
    shown = ids[begins & (keep.roll(1, dims=-1) if ahead else keep)].unique()
    if len(shown) == 0:
        raise Ends(LAW.finding(FIRST, "none is supervised", "no gradient", True))
    # To learn that it follows an end is harmless, and often intended.
    LAW.needs(len(shown) > 1, FIRST, "all documents begin with the same token")
    there = probe.gradient(edits.only(step, step.batch, keep), probe.quiet)
    left = there.norm() / max(probe.gradient().norm(), 1e-300) if there.finite() else 0.0  # 0/0: nothing is left
    yield probe.vanishes(
        FIRST, left,
        f"{int(keep.sum())} first tokens of documents are predicted from the end of another document: set their labels "
        f"to {step.ignore_index}, as collators for packed rows do.",
    )  # fmt: skip


LAW = Law("MI-PACKED", "packed documents", __doc__, check, perturbed=True, asks=(
    (PACKED, 'roles={"ids": …, "documents": …}, where rows are packed,', lambda s: {"ids", "documents"} <= {*s.roles}),
))  # fmt: skip
