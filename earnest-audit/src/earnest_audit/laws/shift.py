"""CV-SHIFT: A label is predicted from the token right before it, and from nothing after that token.

Needs: role ids beside labels (in place, or each where it is predicted), or beside a mask of SFT or distillation; a
model that embeds these ids
How: Only the last label of every row is supervised. What the model embeds is changed, apart from the targets that the
loss reads: the token before the label, which must matter, then all that come after, its own first, which must not.
Exceptions: A mask as wide as the ids may mark tokens or the places that predict them: it is checked only where it marks
a row's last token. A load-balancing term reads every input: rows_interact=True.
Detects: a shift in the script beside the model's own, pytorch #73205 and Megatron #2121 (terms on unsupervised tokens)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.logits import embedded
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.verdict import Finding

ELSEWHERE = "labels do not stand where their tokens do"
MANY = 8  # labels that are not the token after the next one by chance
BEFORE, PEEKING = "the token before a label predicts it", "no label is an input of its own prediction"


def predicts(step: Step) -> bool:
    """A term over all tokens (load balancing) reads every input legitimately; ratios have laws of their own."""
    known = step.kind in ("sft", "divergence", None) and not step.rows_interact
    return known and edits.supervised(step) is not None


def check(probe: Probe) -> Rows:
    step = probe.step
    found = "no family" if step.kind is None else last_labels(probe)
    if found == ELSEWHERE and edits.labels_are(step, 2, MANY):
        why = "The data are shifted by two places: labels that are already the next token are shifted once more."
        raise Ends(LAW.finding(BEFORE, "every label is the token after the next one", "the next token", False, why))
    if isinstance(found, str):
        yield from _by_mask(probe, found)
        return
    keep, source = found
    ids: Tensor = step.batch[step.roles["ids"]]
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    batch, behind = edits.only(step, step.batch, keep), keep.any(-1, keepdim=True) & (places > source) & (ids >= 0)
    with probe.may_refuse(BEFORE, "one label per row cannot be run"):
        by_last = _moved(probe, batch, places == source, probe.is_change, "labels" in step.roles)
    yield probe.descends(
        BEFORE, f"changing it changed the last labels' loss or gradient by {by_last:.2g}",
        by_last if probe.is_change(by_last) else 0.0,
        "The token before a label does not matter to its prediction: logits and labels are shifted by one too many (a "
        "model that shifts its labels itself is given shifted ones), or the mask is.",
    )  # fmt: skip
    LAW.needs(behind.any(), PEEKING, "nothing comes after it")
    with probe.may_refuse(PEEKING, "one label per row cannot be run"):
        yield _peeking(probe, _moved(probe, batch, behind, lambda change: change <= probe.value_room))


def _moved(
    probe: Probe, batch: edits.Batch, where: Tensor, enough: Callable[[float], bool], edited: bool = False
) -> float:
    """The relative change where the model embeds other ids there: of the loss if that is ``enough``, or else of the
    gradient. ``edited``: where it embeds none of these ids, the batch has the others."""
    step, quiet = probe.step, probe.quiet
    ids: Tensor = step.batch[step.roles["ids"]]
    here, other, shown = probe.look(batch, quiet).loss, edits.other_ids(step, ids, where), dict(batch)
    with embedded(step.model, ids, other) as replaced:
        there = probe.look(batch, quiet).loss
    LAW.needs(replaced or edited, PEEKING, "the model does not embed the ids as they are")
    if not replaced:
        shown[step.roles["ids"]] = other
        there = probe.look(shown, quiet).loss
    size = max(abs(here), abs(there))
    change = abs(here - there) / size if 0 < size < math.inf else 0.0
    if enough(change):
        return change
    taught = probe.gradient(batch, quiet)
    why = "the last label of a row alone has a zero gradient"
    LAW.needs(taught.norm() > 0 and taught.finite(), BEFORE, why, "See the row 'every supervised position'.")
    with embedded(step.model, ids, other):
        return taught.distance(probe.gradient(shown, quiet))


def _peeking(probe: Probe, change: float) -> Finding:
    return probe.same(
        PEEKING, change,
        "Tokens after the predicting one matter to it: logits and labels are not shifted against each other, the mask "
        "is shifted by one, attention looks ahead, or a term (a smoothing, a z-loss) is taken on unsupervised tokens.",
        what="changing the tokens from it on changed the loss or the gradient by {}",
    )  # fmt: skip


def _by_mask(probe: Probe, why: str) -> Rows:
    """Where it is not known which token a mask marks, a token must still not matter to its own prediction."""
    leak, marks_targets = _leak(probe)
    if leak > probe.tolerance:
        yield _peeking(probe, leak)
    elif probe.step.kind is not None:
        yield LAW.not_applicable(PEEKING, why)
    else:
        yield LAW.not_declared(BEFORE, 'family="sft", where ids are predicted one after the other,')
        # Otherwise the mask marks the place before the target, or is shifted by one.
        yield _peeking(probe, leak) if marks_targets else LAW.not_declared(PEEKING, 'family="sft"')


def _leak(probe: Probe) -> tuple[float, bool]:
    """How much the embedding of a row's last target matters to its prediction; and whether that target is known to be
    the marked token: it is that one or the next, the one whose change, with the embedded ids held, changes the loss."""
    step, on = probe.step, edits.supervised_wide(probe.step)
    if on is None or step.kind == "divergence" or "labels" in step.roles:
        return 0.0, False
    key, off = step.roles["ids"], probe.quiet
    ids: Tensor = step.batch[key]
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    last = torch.where(on, places, -1).amax(-1, keepdim=True)
    batch = edits.only(step, step.batch, on & (places == last))
    with suppress(Exception):  # one label per row may be refused
        here = probe.look(batch, off).loss
        for ahead in (0, 1):
            target = (places == last + ahead) & (last >= 0) & (ids >= 0)
            other = edits.other_ids(step, ids, target)
            with embedded(step.model, other, ids) as held:
                there = probe.look({**batch, key: other}, off).loss
            if held and abs(there - here) > 4 * probe.noise * max(abs(there), abs(here)):
                return _moved(probe, batch, target, lambda change: change <= probe.value_room), ahead == 0
    return 0.0, False


def last_labels(probe: Probe) -> tuple[Tensor, Tensor] | str:
    """Where the last label of every row stands [B, T], and which input predicts it [B, 1]; or why that is not known."""
    step = probe.step
    on, ids, labels, documents = edits.supervised(step), *map(step.value, ("ids", "labels", "documents"))
    if ids is None or on is None or on.ndim != 2 or on.shape[0] != ids.shape[0]:
        return "ids are not declared, or not beside the labels"
    width, shown, shift = ids.shape[1], step.value("attention"), 1 if labels is None or edits.in_place(step) else 0
    real = shown != 0 if shown is not None and shown.shape == ids.shape else torch.ones_like(ids, dtype=torch.bool)
    places = torch.arange(width, device=ids.device).expand_as(ids)
    if not shift and not edits.ahead(step):
        return ELSEWHERE
    if labels is None and on.shape[1] == width:
        last = torch.where(real, places, 0).amax(-1, keepdim=True)
        # A row's last token predicts nothing; and a teacher's mask may cover an encoder, which looks both ways.
        if step.kind != "sft" or not bool(on.gather(1, last).any()):
            return "the mask may mark tokens or where they are predicted"
    wide = edits.widened(on, width)
    if wide is None:
        return "the mask is not beside the ids"
    ok = wide & (places >= shift)
    if documents is not None and documents.shape == ids.shape and shift:
        ok = ok & ~edits.begins(documents)  # a document's first token is predicted from another's last
    spot = torch.where(ok, places, -1).amax(-1, keepdim=True)
    keep = (places == spot) & ok & real.gather(1, (spot - shift).clamp(min=0))
    if not bool(keep.any()):
        return "no row has a label with a token before it"
    return keep, torch.where(keep.any(-1, keepdim=True), spot - shift, width)


LAW = Law("CV-SHIFT", "shift", __doc__, check, quick=False, when=predicts, perturbed=True)
