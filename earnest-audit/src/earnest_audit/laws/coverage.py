"""CV: Every supervised position has a gradient, the terminal token too, and the supervised share is neither 0 nor 1.

Needs: roles mask or labels; ids and tokenizer to show the span
How: The loss has a derivative by the signal of a supervised token. Where it has none, or no signal has one value per
token, it has a gradient where that token is the only supervised one; the first and the last of a row, and the last of
another, are tried.
Exceptions: A clipped token has a zero gradient by design for one sign of its advantage, so both are tried (by the
rewards where the step makes its own advantages; where neither is declared, wide clips). A bound, such as that of a dual
clip, acts on both, and is widened. Rows of advantage 0 are left out. A loss that drops tokens on purpose declares
drops_tokens=True. Where rows interact (a mean over all tokens is taken off), one token alone may have none.
Detects: Megatron-Bridge #3359, marin #7237, TRL #4201, end-of-turn tokens masked because pad = eos
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.verdict import Finding

ROWS = 2
UNCLIPPED = 1e3  # a clip range that no ratio of a batch leaves
POSITIONS = "every supervised position"


def check(probe: Probe) -> Rows:
    step = probe.step
    on = edits.supervised(step)
    if on is None and step.kind == "preference":
        return  # what is not in an answer's gradient, laws IG and MI see
    if on is None:
        raise Ends(LAW.not_declared("supervised positions", 'roles={"mask": …} or {"labels": …}'))
    on = on if on.ndim == 2 else on.flatten(2).any(-1) if on.ndim > 2 else on[:, None]
    share = _share(step.value("attention"), on)
    ids = step.value("ids")
    prompts = ids is not None and on.shape == ids.shape and not step.all_supervised
    unknown = prompts and share == 1 and step.all_supervised is None
    empty = int((~on.any(-1)).sum())
    yield LAW.finding(
        "supervised share",
        f"{share:.0%} of the tokens{_decoded(probe, on)}" + (f"; {empty} of {len(on)} rows have none" if empty else ""),
        "above 0 %, below 100 %" if prompts else "above 0 %",
        "not declared" if unknown else share > 0 and (share < 1 or not prompts),
        "Everything is supervised. Declare all_supervised=True if the prompts are meant to be, or False if not."
        if unknown
        else "Nothing is supervised, or everything is, the prompt included: the chat template marks no assistant span.",
    )  # fmt: skip
    if share > 0:
        yield _every_position(probe, on)


def _share(attention: Tensor | None, on: Tensor) -> float:
    """Supervised tokens among the real ones; an attention mask of another width is ignored."""
    fits = attention is not None and attention.ndim == 2 and attention.shape[1] - on.shape[1] in (0, 1)
    real = int((attention != 0).sum()) if attention is not None and fits else on.numel()
    return int(on.sum()) / max(real, 1)


def _decoded(probe: Probe, on: Tensor) -> str:
    ids = probe.step.value("ids")
    if probe.step.tokenizer is None or ids is None or ids.shape != on.shape:
        return ""
    return f"; row 0: {probe.step.tokenizer.decode(ids[0][on[0]].tolist())!r}"


def _every_position(probe: Probe, on: Tensor) -> Finding:
    step = probe.step
    supervised = _predicted(step, on)
    a = step.value("advantages")
    flat = supervised if a is None else supervised & (a != 0).reshape(len(a), -1).any(-1, keepdim=True)
    idle, count = int((supervised.any(-1) & ~flat.any(-1)).sum()), int(flat.sum())
    aside = f"; {idle} rows without an advantage are left out" if idle else ""
    if not count:
        return LAW.not_applicable(POSITIONS, f"no position to check{aside}")
    shown = _by_slope(probe, flat)
    if shown is None and "labels" not in step.roles and step.kind != "sft":
        return LAW.not_declared(POSITIONS, "labels, or a signal with one value per token")
    if shown is not None and "rewards" in step.roles:  # the advantage that the step makes for a row may be 0
        flat = flat & shown.any(-1, keepdim=True)
    doubtful = flat if shown is None else flat & ~shown
    if bool(doubtful.any()) and not step.empty_rows:
        return LAW.not_applicable(POSITIONS, "one token alone leaves rows without any")
    if not bool(doubtful.any()):
        return LAW.finding(POSITIONS, f"all {count} matter{aside}", "all", True)
    found: dict[str, bool] = {}
    for one, spot in _asked(doubtful):
        if not found or probe.afford(2, keep=8.0 if probe.coarse else 6.0):  # later laws need as much
            with probe.may_refuse(POSITIONS, "one token alone cannot be run"):
                found[one] = _alone(probe, spot)
    missing, dropped = [one for one, matters in found.items() if not matters], step.drops_tokens
    if len(missing) == len(found) and torch.equal(doubtful, flat) and (step.rows_interact or dropped):
        return LAW.not_applicable(POSITIONS, f"no single token alone has a gradient{aside}")
    return LAW.finding(
        POSITIONS, f"{len(found)} of {count} positions tried, {len(found) - len(missing)} matter{aside}",
        "some, tokens are dropped by declaration" if dropped else "all", dropped or not missing,
        f"{', '.join(missing)} is in the mask and not in the gradient: a first or last token is cut off by a shift, or "
        "the end-of-turn token is masked because its id is the padding's. Where the loss itself leaves out tokens or "
        "rows on purpose, declare drops_tokens=True.",
    )  # fmt: skip


def _by_slope(probe: Probe, flat: Tensor) -> Tensor | None:
    """Where the loss has a derivative by a signal with one value per token, for one sign of the advantages or for the
    other; None where there is no such signal, or where labels mark the tokens."""
    step = probe.step
    for role in ("advantages", "behaviour", "teacher") if "labels" not in step.roles else ():
        value = step.value(role)
        if value is None or not value.is_floating_point() or value.shape[:2] != flat.shape:
            continue
        plain = dict(step.batch)
        shown = _slope(probe, role, flat, plain)
        if not bool((flat & ~shown).any()):
            return shown
        if (other := edits.opposite(step, step.batch)) is not None:
            with suppress(Exception):  # rewards that the step refuses show nothing
                shown = shown | _slope(probe, role, flat, other)
        acts = step.clips if other is None else [k for k in step.clips if step.kinds[k] == "bound"]  # for both signs
        if acts and bool((flat & ~shown).any()):
            try:
                shown = shown | _slope(probe, role, flat, plain, dict.fromkeys(acts, UNCLIPPED))
            except Exception as error:  # clipped tokens cannot be told from missing ones
                raise Ends(LAW.not_declared(POSITIONS, "advantages or rewards")) from error
        return shown
    return None


def _slope(
    probe: Probe, role: str, flat: Tensor, batch: edits.Batch, knobs: Mapping[str, float] | None = None
) -> Tensor:
    slope = probe.slopes([role], batch, knobs).inputs[role]
    return torch.zeros_like(flat) if slope is None else (slope != 0).reshape(*flat.shape, -1).any(-1)


def _predicted(step: Step, on: Tensor) -> Tensor:
    """The supervised places that something predicts [B, T]."""
    ids, labels, documents = (step.value(r) for r in ("ids", "labels", "documents"))
    flat = on.clone()
    if labels is not None and labels.shape == flat.shape:
        if edits.in_place(step):  # nothing stands before a row's, or a document's, first token
            flat[:, 0] = False
            if documents is not None and documents.shape == flat.shape:
                flat = flat & ~edits.begins(documents)
    elif ids is not None and ids.shape == flat.shape:
        flat = flat & ~flat[:, :1]  # whole rows: a mask may mark tokens or the places that predict them
    return flat


def _asked(flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The first and the last token of a row, and the last one of another."""
    for number, row in enumerate(flat.any(-1).nonzero()[:ROWS, 0].tolist()):
        places = flat[row].nonzero()[:, 0].tolist()
        for place, what in {places[0]: "first", places[-1]: "last"}.items() if not number else ((places[-1], "last"),):
            spot = torch.zeros_like(flat)
            spot[row, place] = True
            yield f"the {what} one of row {row}", spot


def _alone(probe: Probe, spot: Tensor) -> bool:
    """Whether the loss has a gradient where this token is the only supervised one; a clipped token has one under the
    opposite advantages only."""
    step = probe.step
    width = max(step.batch[step.roles[r]].shape[1] for r in ("mask", "labels") if r in step.roles)
    keep = torch.nn.functional.pad(spot, (width - spot.shape[1], 0))
    if _trains(probe, edits.only(step, step.batch, keep)):
        return True
    other = edits.opposite(step, step.batch)
    with suppress(Exception):  # as in _by_slope
        return other is not None and _trains(probe, edits.only(step, other, keep))
    return False


def _trains(probe: Probe, batch: edits.Batch) -> bool:
    gradient = probe.gradient(batch)
    return gradient.finite() and gradient.norm() > 0


LAW = Law("CV", "coverage", __doc__, check, quick=False)
