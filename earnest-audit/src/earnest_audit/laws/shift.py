"""CV-SHIFT: A label is predicted from the token right before it, and from nothing after that token.

Only the last label of every row is supervised. Then the input that predicts it matters, and no input after that one
does, above all not the label's own token.

Needs: role ids beside labels (in place, or each where it is predicted), or beside a mask of SFT or distillation
How: Only the last label of every row is supervised; the token before it is changed, then all that come after.
Exceptions: A mask as wide as the ids may mark tokens or the places that predict them: it is checked only where it marks
a row's last token. A load-balancing term reads every input: rows_interact=True.
Detects: a shift in the script beside the model's own, pytorch #73205 and Megatron #2121 (terms on unsupervised tokens)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.embedding import embedded
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.laws.coverage import known_to_say_where, labels_say_where
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.verdict import Finding

BEFORE, PEEKING = "the token before a label predicts it", "no label is an input of its own prediction"


def predicts(step: Step) -> bool:
    """A term over all tokens (load balancing) reads every input legitimately; ratios have laws of their own."""
    known = step.kind in ("sft", "divergence", None) and not step.rows_interact
    return known and edits.supervised(step) is not None


def check(probe: Probe) -> Rows:
    step = probe.step
    leak, marks_targets = None, False
    if step.kind != "divergence" and step.value("labels") is None:
        leak, marks_targets = _leak(probe)
    if leak is not None and leak > probe.tolerance:
        raise Ends(_peeking(probe, leak))
    if step.kind is None:
        yield LAW.not_declared(BEFORE, 'family="sft", where ids are predicted one after the other,')
        if leak is None or not marks_targets:  # the mask marks the place before the target, or is shifted by one
            yield LAW.not_declared(PEEKING, 'family="sft"')
        else:
            yield _peeking(probe, leak)
        return
    found = _places(probe)
    if isinstance(found, str):
        raise Ends(LAW.not_applicable(PEEKING, found))
    keep, source = found
    key = step.roles["ids"]
    ids = step.batch[key]
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    batch = edits.only(step, step.batch, keep)
    behind = keep.any(-1, keepdim=True) & (places > source) & (ids >= 0)
    narrow = behind & (places > source + 1)
    if step.value("labels") is None or known_to_say_where(probe):
        behind = narrow  # ids are what is to be predicted, too: the target itself matters
    before = {**batch, key: edits.other_ids(step, ids, places == source)}
    after = {**batch, key: edits.other_ids(step, ids, behind)}
    with probe.may_refuse(BEFORE, "one label per row cannot be run"):
        by_last, by_own = _moved(probe, batch, before, after if bool(behind.any()) else None)
        if by_own is not None and by_own > probe.tolerance and "labels" in step.roles and labels_say_where(probe):
            # Labels only mark positions; the targets are the ids, so only what comes after them must not matter.
            by_own = _moved(probe, batch, before, {**batch, key: edits.other_ids(step, ids, narrow)})[1]
    if by_last is None:
        why = "the last label of a row alone has a zero gradient"
        raise Ends(LAW.not_applicable(BEFORE, why, "See the row 'every supervised position'."))
    yield probe.descends(
        BEFORE, f"changing it changed the last labels' loss or gradient by {by_last:.2g}", by_last,
        "The token right before a label does not matter to its prediction: logits and labels are shifted against each "
        "other by one too many (a model that shifts its labels itself is given shifted ones), or the mask is.",
    )  # fmt: skip
    change = by_own if by_own is not None else leak
    yield LAW.not_applicable(PEEKING, "nothing comes after it") if change is None else _peeking(probe, change)


def _peeking(probe: Probe, change: float) -> Finding:
    return probe.same(
        PEEKING, change,
        "Tokens after the predicting one matter to the prediction: the token that is to be predicted is in the input "
        "that predicts it (logits and labels are not shifted against each other), the mask is shifted by one, "
        "attention looks ahead, or a term is taken on tokens that are not supervised (a smoothing, a z-loss over "
        "padding).",
        what="changing the tokens from it on changed the loss or the gradient by {}",
    )  # fmt: skip


def _leak(probe: Probe) -> tuple[float | None, bool]:
    """How much a token's own embedding matters to its prediction, where ids are inputs and targets. None where no id is
    a target, or the model's embedding is not given the ids. And whether the target is the marked token itself.

    Only the last supervised place of every row counts. Its target is the token there or the next one: the one whose
    change, with the embedded ids held, changes the loss.
    """
    step, on = probe.step, edits.supervised_wide(probe.step)
    if on is None:
        return None, False
    key, off = step.roles["ids"], step.terms_off
    ids = step.batch[key]
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    last = torch.where(on, places, -1).amax(-1, keepdim=True)
    batch = edits.only(step, step.batch, on & (places == last))
    try:
        here = probe.look(batch, off).loss
        for ahead in (0, 1):
            other = edits.other_ids(step, ids, (places == last + ahead) & (last >= 0) & (ids >= 0))
            with embedded(step.model, other, ids) as held:
                target = probe.look({**batch, key: other}, off).loss
            if not held:
                return None, False
            if abs(target - here) <= 4 * probe.noise() * max(abs(target), abs(here)):
                continue
            with embedded(step.model, ids, other):
                there = probe.look(batch, off).loss
                if abs(there - here) <= probe.value_room * max(abs(there), abs(here)):
                    return 0.0, ahead == 0
                changed = probe.gradient(batch, off)
            return probe.gradient(dict(batch), off).distance(changed), ahead == 0
    except Exception:  # one label per row may be refused; the law's other measurements report it
        return None, False
    return None, False


def _places(probe: Probe) -> tuple[Tensor, Tensor] | str:
    """Where the last label of every row stands [B, T], and which input predicts it [B, 1]; or why that is not known."""
    step = probe.step
    on, ids, labels, documents = edits.supervised(step), *map(step.value, ("ids", "labels", "documents"))
    if ids is None or on is None or on.ndim != 2 or on.shape[0] != ids.shape[0]:
        return "ids are not declared, or not beside the labels"
    width, shown, shift = ids.shape[1], step.value("attention"), 1
    real = shown if shown is not None and shown.shape == ids.shape else torch.ones_like(ids)
    if labels is not None:
        if not (edits.in_place(step) or edits.ahead(step)):
            return "labels do not stand where their tokens do"
        shift = 1 if edits.in_place(step) else 0
    else:
        last = torch.where(real != 0, torch.arange(width, device=ids.device), 0).amax(-1, keepdim=True)
        # A row's last token predicts nothing; and a teacher's mask may cover an encoder, which looks both ways.
        if on.shape[1] == width and (step.kind != "sft" or not bool(on.gather(1, last).any())):
            return "the mask may mark tokens or where they are predicted"
    wide = edits.widened(on, width)
    if wide is None:
        return "the mask is not beside the ids"
    places = torch.arange(width, device=ids.device).expand_as(ids)
    ok = wide & (places >= shift)
    if documents is not None and documents.shape == ids.shape and shift:
        ok = ok & ~edits.begins(documents)  # a document's first token is predicted from another's last
    spot = torch.where(ok, places, -1).amax(-1, keepdim=True)
    keep = (places == spot) & ok & (real != 0).gather(1, (spot - shift).clamp(min=0))
    if not bool(keep.any()):
        return "no row has a label with a token before it"
    return keep, torch.where(keep.any(-1, keepdim=True), spot - shift, width)


def _moved(
    probe: Probe, batch: edits.Batch, before: edits.Batch, after: edits.Batch | None
) -> tuple[float | None, float | None]:
    """The relative change by either edit: of the loss where that is enough, or else of the gradient. None: there is no
    gradient, or nothing to change."""
    quiet = probe.step.terms_off
    here = probe.look(batch, quiet).loss

    def off(changed: edits.Batch) -> float:
        there = probe.look(changed, quiet).loss
        size = max(abs(here), abs(there))
        return abs(here - there) / size if 0 < size < math.inf else 0.0

    by_last = off(before)
    by_own = None if after is None else off(after)
    if not probe.is_change(by_last):
        taught = probe.gradient(batch, quiet)
        if taught.norm() == 0 or not taught.finite():
            return None, None
        by_last = taught.distance(probe.gradient(before, quiet))
        by_last = by_last if probe.is_change(by_last) else 0.0
    if after is not None and by_own is not None and by_own > probe.value_room:
        by_own = probe.gradient(batch, quiet).distance(probe.gradient(after, quiet))
    return by_last, by_own


LAW = Law("CV-SHIFT", "shift", __doc__, check, quick=False, when=predicts, perturbed=True)
