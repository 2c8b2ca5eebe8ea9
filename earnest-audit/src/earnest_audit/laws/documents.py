"""MI-PACKED: Documents in one packed row are independent: ids and signals of the others do not matter, and a document's
first token is not a target.

other documents     every second document of a row is supervised: ids and signals of the others do not matter
first tokens        a document's first token is not predicted from the document before it

Needs: roles documents and ids beside mask or labels
How: Every second document is supervised while the others are changed; then only first tokens are supervised.
Exceptions: A first token that all documents share (BOS after EOS) may be supervised.
Detects: TRL #4170, torchtitan #4075, nanoVLM #201
"""

from __future__ import annotations

from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.probe import Probe
from earnest_audit.step import Step

PACKED, FIRST = "another document in the packed row", "documents' first tokens"


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
    yield from probe.tried({PACKED: _others(probe, begins, on), FIRST: _first(probe, begins, on)})


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
            for salt, role in enumerate(signals):
                changed = _other_signal(step, changed, role, others, salt)
            changes.append(before.distance(probe.gradient(changed)))
    if not changes:
        raise Ends(LAW.not_applicable(PACKED, "no loss is taken inside a document that shares its row"))
    yield probe.same(
        PACKED, max(changes),
        "Documents of one packed row depend on each other. Either attention does not know the packing (position ids, "
        "cu_seqlens; an all-ones mask may switch its detection off), or a signal is summed along the whole row.",
    )  # fmt: skip


def _other_signal(step: Step, batch: edits.Batch, role: str, where: Tensor, salt: int) -> edits.Batch:
    """Other values there; rewards only where there are some, since they may be summed without a mask."""
    old: Tensor = step.batch[step.roles[role]]
    there = edits.fit(where, old)
    assert there is not None
    there = there.expand_as(old) & (old != 0) if role == "rewards" else there.expand_as(old)
    return edits.perturb(step, batch, role, edits.generator(step, 700 + salt), where=there)


def _first(probe: Probe, begins: Tensor, on: Tensor) -> Rows:
    """Only documents' first tokens are supervised, where the batch supervises them: they have no gradient."""
    step = probe.step
    ids, labels, mask = step.value("ids"), step.value("labels"), step.value("mask")
    assert ids is not None
    ahead = edits.ahead(step)
    if not (ahead or edits.in_place(step) or (labels is None and mask is not None and mask.shape[1] < ids.shape[1])):
        raise Ends(LAW.not_applicable(FIRST, "it is not known which label belongs to which token"))
    keep = on & (begins.roll(-1, dims=-1) if ahead else begins)
    shown = ids[begins & (keep.roll(1, dims=-1) if ahead else keep)].unique()
    if len(shown) == 0:
        raise Ends(LAW.finding(FIRST, "none is supervised", "no gradient", True))
    if len(shown) == 1:  # learning that it follows an end is harmless, and often intended
        raise Ends(LAW.not_applicable(FIRST, "all documents begin with the same token"))
    there = probe.gradient(edits.only(step, step.batch, keep), probe.quiet)
    left = there.norm() / max(probe.gradient().norm(), 1e-300) if there.finite() else 0.0  # 0/0: nothing is left
    yield probe.vanishes(
        FIRST, left,
        f"The first tokens of {int(keep.sum())} packed documents are predicted from the end of another document: set "
        f"their labels to {step.ignore_index}, as collators for packed rows do.",
    )  # fmt: skip


LAW = Law("MI-PACKED", "packed documents", __doc__, check, perturbed=True, asks=(
    (PACKED, 'roles={"ids": …, "documents": …}, where rows are packed,', declared),
))  # fmt: skip
