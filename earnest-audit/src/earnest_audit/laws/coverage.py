"""CV: Every supervised position has a gradient, the terminal token too, and the supervised share is neither 0 nor 1.

Needs: roles mask or labels; ids and tokenizer to show the span
How: The loss has a derivative by the signal of every supervised token; or, where no signal has one value per token, a
gradient where a single token is the only supervised one.
Exceptions: A clipped token has a zero gradient by design under one sign of its advantage, so both signs are tried. Rows
of advantage 0 have none under either sign and are left out. A loss that drops tokens on purpose declares
drops_tokens=True.
Detects: Megatron-Bridge #3359, marin #7237, TRL #4201, end-of-turn tokens masked because pad = eos
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.verdict import Finding

ROWS = 2
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
    """By the derivative of the loss by a signal with one value per token, at once; or else single tokens alone."""
    step = probe.step
    role = next((r for r in ("labels", "advantages", "behaviour", "teacher") if _fit(step, r, on) is not None), None)
    if role is None and step.kind == "sft" and "mask" in step.roles and not step.drops_tokens:
        role = "mask"
    if role is None:
        return LAW.not_declared(POSITIONS, "labels, or a signal with one value per token")
    supervised = _positions(probe, role, on)
    flat = supervised & _with_advantage(probe, role, supervised)
    idle, count = int((supervised.any(-1) & ~flat.any(-1)).sum()), int(flat.sum())
    aside = f"; {idle} rows without an advantage are left out" if idle else ""
    if not count:
        return LAW.not_applicable(POSITIONS, f"no position to check{aside}")
    if (reached := _slopes(probe, role, flat)) is not None:
        missing = [(row, f"{place}th") for row, place in (flat & ~reached).nonzero().tolist()]
        measured = f"{count - len(missing)} of {count} matter (through {step.roles[role]!r}){aside}"
        return _verdict(probe, missing, count, measured)
    found: dict[tuple[int, str], bool] = {}
    for one, spot in _asked(flat):
        if not found or probe.afford(2, keep=_later(probe)):
            with probe.may_refuse(POSITIONS, "one token alone cannot be run"):
                found[one] = _alone(probe, spot)
    missing = [one for one, matters in found.items() if not matters]
    if len(missing) == len(found) and not step.drops_tokens:
        return LAW.not_applicable(POSITIONS, f"no single token alone has a gradient{aside}")
    measured = f"{len(found)} of {count} positions tried, {len(found) - len(missing)} matter{aside}"
    return _verdict(probe, missing, len(found), measured)


def _asked(flat: Tensor) -> Iterator[tuple[tuple[int, str], Tensor]]:
    """The first and the last token of a row, and the last one of another."""
    for number, row in enumerate(flat.any(-1).nonzero()[:ROWS, 0].tolist()):
        places = flat[row].nonzero()[:, 0].tolist()
        for place, what in {places[0]: "first", places[-1]: "last"}.items() if not number else ((places[-1], "last"),):
            spot = torch.zeros_like(flat)
            spot[row, place] = True
            yield (row, what), spot


def _alone(probe: Probe, spot: Tensor) -> bool:
    """Whether the loss has a gradient where this token is the only supervised one; a clipped token has one under the
    opposite advantages only."""
    step = probe.step
    width = max(step.batch[step.roles[r]].shape[1] for r in ("mask", "labels") if r in step.roles)
    keep = torch.nn.functional.pad(spot, (width - spot.shape[1], 0))
    for base in (step.batch, edits.opposite(step, step.batch)):
        if base is not None:
            gradient = probe.gradient(edits.only(step, base, keep))
            if gradient.finite() and gradient.norm() > 0:
                return True
    return False


def _positions(probe: Probe, role: str, on: Tensor) -> Tensor:
    """Where a role's values have to matter [B, T]."""
    step = probe.step
    bounds = edits.bounds(step, role) if role == "teacher" else None
    fitting = _fit(step, role, on) if bounds is None else bounds[0]
    assert fitting is not None
    flat = fitting if fitting.ndim == 2 else fitting.flatten(2).any(-1)
    if role == "labels" and edits.in_place(step):  # nothing stands before a row's, or a document's, first token
        flat = flat.clone()
        flat[:, 0] = False
        documents = step.value("documents")
        if documents is not None and documents.shape == flat.shape:
            flat = flat & ~edits.begins(documents)
    if role == "mask" and (ids := step.value("ids")) is not None and ids.shape == flat.shape:
        flat = flat & ~flat[:, :1]  # whole rows: it may mark tokens or the places that predict them
    return flat


def _later(probe: Probe) -> float:
    """The cost that later laws need: in 16 bits finite differences use a copy in fp32."""
    return 8.0 if probe.coarse else 6.0


def _verdict(probe: Probe, missing: list[tuple[int, str]], count: int, measured: str) -> Finding:
    dropped = probe.step.drops_tokens
    return LAW.finding(
        POSITIONS, measured, "some, tokens are dropped by declaration" if dropped else "all",
        ("holds" if len(missing) < count else "not applicable") if dropped else not missing,
        f"{', '.join(f'the {what} one of row {row}' for row, what in missing[:4])} is in the mask and not in the "
        "gradient: a first or last token is cut off by a shift, or the end-of-turn token is masked because its id is "
        "the padding's. Where the loss itself leaves out tokens or rows on purpose, declare drops_tokens=True.",
    )  # fmt: skip


def _with_advantage(probe: Probe, role: str, flat: Tensor) -> Tensor:
    """Where the advantage is 0 (a group without variance) neither labels nor behaviour can matter to a policy
    gradient; other signals are terms of their own, and advantages themselves are given another value."""
    value = probe.step.value("advantages")
    if value is None or role not in ("labels", "behaviour"):
        return torch.ones_like(flat)
    on = value != 0
    return on if on.shape == flat.shape else on.reshape(len(on), -1).any(-1, keepdim=True).expand_as(flat)


def _slopes(probe: Probe, role: str, flat: Tensor) -> Tensor | None:
    """Where the loss has a derivative by the signal; None where derivatives do not show it.

    A clipped token has none under one sign of its advantage, so tokens without one are tried under the other sign, and
    then with behaviour = current policy, where no clip acts.
    """
    step = probe.step
    if not step.batch[step.roles[role]].is_floating_point():
        return None
    found_by_slope = torch.zeros_like(flat)
    asked = [lambda: dict(step.batch), lambda: edits.opposite(step, step.batch), lambda: _at_ratio_one(probe, role)]
    for make in asked:
        batch = make()
        slope = None if batch is None else probe.slopes([role], batch).inputs[role]
        if slope is None:
            return None
        found_by_slope = found_by_slope | (slope != 0 if slope.ndim == 2 else (slope != 0).flatten(2).any(-1))
        if bool(found_by_slope[flat].all()):
            return found_by_slope
    return found_by_slope if bool(found_by_slope[flat].any()) else None


def _at_ratio_one(probe: Probe, role: str) -> edits.Batch | None:
    step = probe.step
    if role != "behaviour" or step.logprobs is None:
        return None
    keys = [step.roles[r] for r in edits.SAMPLERS if r in step.roles]
    if any(step.batch[k].numel() != probe.now().numel() for k in keys):
        return None
    return probe.as_policy(step.batch)


def _fit(step: Step, role: str, on: Tensor) -> Tensor | None:
    """The mask in the shape of the signal; labels may be one wider, beside a mask of the shifted targets."""
    value = step.value(role)
    if value is not None and role == "labels" and value.ndim == 2 and value.shape[1] - on.shape[1] == 1:
        on = torch.nn.functional.pad(on, (1, 0)) & (value != step.ignore_index)
    return None if value is None else edits.fit(on, value)


LAW = Law("CV", "coverage", __doc__, check, quick=False)
