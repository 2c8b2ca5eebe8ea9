"""CV: Every supervised position has a gradient, the terminal token too, and the supervised share is neither 0 nor 1.

Needs: roles mask or labels, or chosen_mask and rejected_mask; ids and tokenizer to show the span
How: The signal of single supervised tokens is changed, and each must move the gradient.
Exceptions: A clipped token has a zero gradient by design under one sign of its advantage, so both signs are tried. Rows
of advantage 0 have none under either sign and are left out, and so are pairs beyond a hinge. A loss that drops tokens
on purpose declares drops_tokens=True.
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
ANSWERS, POSITIONS = "every answer's last token", "every supervised position"


def check(probe: Probe) -> Rows:
    step = probe.step
    on = edits.supervised(step)
    if step.kind == "preference" and set(edits.SIDES) <= step.roles.keys():
        yield _answers(probe)
        if on is None:
            return
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
    """Change the signal of one supervised token at a time: the last ones of a few rows, and a first one."""
    step = probe.step
    role = next((r for r in ("labels", "advantages", "behaviour", "teacher") if _fit(step, r, on) is not None), None)
    if role is None and step.kind == "sft" and "mask" in step.roles and not step.drops_tokens:
        role = "mask"
    if role is None:
        return LAW.not_declared(POSITIONS, "labels, or a signal with one value per token")
    key, supervised = step.roles[role], _positions(probe, role, on)
    flat = supervised & _with_advantage(probe, role, supervised)
    idle = int((supervised.any(-1) & ~flat.any(-1)).sum())
    aside = f"; {idle} rows without an advantage are left out" if idle else ""
    if not bool(flat.any()):
        return LAW.not_applicable(POSITIONS, f"no position to check{aside}")
    found_by_slope = _slopes(probe, role, flat)
    if found_by_slope is not None:
        unreached = [(row, place, f"{place}th") for row, place in (flat & ~found_by_slope).nonzero().tolist()]
        count = int(flat.sum())
        found = f"{count - len(unreached)} of {count}" if unreached else f"all {count}"
        return _verdict(probe, unreached, count, f"{found} matter (through {key!r}){aside}")
    asked: list[tuple[int, int, str]] = []
    for row in flat.any(-1).nonzero()[:ROWS, 0].tolist():
        places = flat[row].nonzero()[:, 0].tolist()
        ends = {places[-1]: "last", places[0]: "first"} if not asked else {places[-1]: "last"}
        asked += [(row, place, what) for place, what in ends.items()]
    missing: list[tuple[int, int, str]] = []
    where_only = False
    for number, one in enumerate(asked):
        if number > len(missing) and not probe.afford(1 if role in ("labels", "mask") else 3, keep=_later(probe)):
            asked = asked[:number]
            break
        spot = _at(flat, *one[:2])
        if _matters(probe, role, spot, where_only):
            continue
        if one is asked[0] and role == "labels" and _labels_say_where(probe):
            where_only, aside = True, f"{aside}; labels only mark positions, and are removed"
            if _matters(probe, role, spot, where_only):
                continue
        missing.append(one)
    measured = f"{_counted(len(asked), int(flat.sum()), len(missing))} (through {key!r}){aside}"
    return _verdict(probe, missing, len(asked), measured)


def _counted(tried: int, count: int, missing: int, what: str = "positions") -> str:
    """How many matter of those that were tried, and how many there are."""
    few = tried < count
    return (
        f"{tried} of {count} {what} tried, {tried - missing} matter" if few else f"{tried - missing} of {tried} matter"
    )


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


def _verdict(probe: Probe, missing: list[tuple[int, int, str]], count: int, measured: str) -> Finding:
    dropped = probe.step.drops_tokens
    return LAW.finding(
        POSITIONS, measured, "some, tokens are dropped by declaration" if dropped else "all",
        ("holds" if len(missing) < count else "not applicable") if dropped else not missing,
        f"{', '.join(f'the {what} one of row {row}' for row, _, what in missing[:4])} is in the mask and not in the "
        "gradient: the last (end-of-turn) token is cut off by a shift or masked because its id equals the padding's. "
        "Where the loss itself leaves out tokens or rows on purpose, declare drops_tokens=True.",
    )  # fmt: skip


def _at(flat: Tensor, row: int, place: int) -> Tensor:
    only = torch.zeros_like(flat)
    only[row, place] = True
    return only


def _labels_say_where(probe: Probe) -> bool:
    """Whether other labels give the same gradient: then labels only mark positions and the ids are the targets."""
    key = probe.step.roles["labels"]
    labels = probe.step.batch[key]
    other = {**probe.step.batch, key: edits.other_ids(probe.step, labels, labels >= 0)}
    return not probe.is_change(probe.change(other))


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


def _matters(probe: Probe, role: str, only: Tensor, removed: bool) -> bool:
    """Whether any other value of this one token's signal changes the gradient; the opposite advantages are tried
    last."""
    for base in (probe.step.batch, edits.opposite(probe.step, probe.step.batch)):
        if base is None:
            continue
        origin = probe.gradient(base)
        changes = _changes(probe, dict(base), role, only, removed)
        if any(probe.differs(origin, probe.gradient(changed)) for changed in changes):
            return True
    return False


def _answers(probe: Probe) -> Finding:
    """The last token of either answer of a few pairs, one at a time: another id there changes the gradient."""
    step = probe.step
    missing: list[str] = []
    tried = flat = total = 0
    for side in edits.SIDES:
        ids: Tensor = step.batch[step.roles[side]]
        given = next((v for v in (step.value(f"{side}_mask"), step.value(f"{side}_attention")) if v is not None), None)
        on = None if given is None or ids.ndim != 2 or given.ndim != 2 else edits.widened(given != 0, ids.shape[1])
        if on is None:
            return LAW.not_declared(ANSWERS, 'roles={"chosen_mask": …, "rejected_mask": …}')
        total += int(on.any(-1).sum())
        for number, row in enumerate(on.any(-1).nonzero()[:ROWS, 0].tolist()):
            if number and not missing and not probe.afford(2, keep=_later(probe)):
                break
            other = edits.other_ids(step, ids, _at(on, row, int(on[row].nonzero()[-1])))
            tried += 1
            if probe.is_change(probe.change({**step.batch, step.roles[side]: other})):
                continue
            try:
                pulls = probe.gradient(edits.take_rows(step, torch.tensor([row]))).norm()
            except Exception as error:
                return LAW.unchecked(ANSWERS, error)
            if pulls > 0:
                missing.append(f"the {side} answer of pair {row}")
            else:  # for example beyond the margin of a hinge
                flat += 1
    if tried == flat:
        return LAW.not_applicable(ANSWERS, f"none of {tried} pairs has a gradient")
    aside = f"; {flat} of pairs without a gradient are left out" if flat else ""
    return LAW.finding(
        ANSWERS, f"{_counted(tried - flat, total - flat, len(missing), 'answers')}{aside}", "all",
        not missing or step.drops_tokens,
        f"The last token of {', '.join(missing[:4])} is not in the gradient: it is cut off by a shift, masked because "
        "its id equals the padding's, or the reward is read at another token.",
    )  # fmt: skip


def _fit(step: Step, role: str, on: Tensor) -> Tensor | None:
    """The mask in the shape of the signal; labels may be one wider, beside a mask of the shifted targets."""
    value = step.value(role)
    if value is not None and role == "labels" and value.ndim == 2 and value.shape[1] - on.shape[1] == 1:
        on = torch.nn.functional.pad(on, (1, 0)) & (value != step.ignore_index)
    return None if value is None else edits.fit(on, value)


def _changes(probe: Probe, base: edits.Batch, role: str, only: Tensor, removed: bool) -> Iterator[edits.Batch]:
    """Other values for one token, of which at least one must change the gradient. A clipped token has a zero gradient
    under its own advantage and not under the opposite one; a ratio just outside its clip comes back from one side."""
    step, key = probe.step, probe.step.roles[role]
    old: Tensor = base[key]
    where = only
    while where.ndim < old.ndim:
        where = where[..., None]
    if removed or role == "mask":
        yield {**base, key: torch.where(only, step.ignore_index if removed else 0, old)}
    elif role == "labels":
        other = old[old >= 0]
        fresh = other[other != old[only][0]]
        yield {**base, key: torch.where(only, fresh[0] if len(fresh) else old[only][0] + 1, old)}
    elif role == "advantages":
        for new in (torch.where(old == 0, torch.ones_like(old), -old), old + 1):
            yield {**base, key: torch.where(where, new, old)}
    elif role == "behaviour":
        # Then values further away: without the policy's log-probs it is not known where a capped ratio is inside.
        far = (old / 2, 2 * old, torch.full_like(old, -1e-4), 4 * old) if step.logprobs is None else ()
        for new in (*(old + shift for shift in (-0.05, 0.05, -0.5, 0.5)), *far):
            yield {**base, key: torch.where(where, new.clamp(max=-1e-4), old)}
    else:
        yield edits.perturb(step, base, role, edits.generator(step, 77), where=where.expand_as(old))


LAW = Law("CV", "coverage", __doc__, check, quick=False)
