"""CV: every supervised position matters, the last one of a completion too; the supervised share is neither 0 nor 1."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from earnest.audit import edits
from earnest.audit.law import Law, not_declared
from earnest.audit.probe import Probe
from earnest.audit.verdict import Finding

ROWS = 2
PEEKING = "no label is seen before it is predicted"


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    on = edits.supervised(step)
    if on is None:
        yield not_declared("CV", "supervised positions", 'roles={"mask": …} or {"labels": …}')
        return
    real = on.numel() if step.value("attention") is None else int((step.batch[step.roles["attention"]] != 0).sum())
    share = int(on.sum()) / max(real, 1)
    prompts = "ids" in step.roles and on.shape == step.batch[step.roles["ids"]].shape
    prompts = prompts and not step.all_supervised
    unknown = prompts and share == 1 and step.all_supervised is None
    yield LAW.finding(
        "supervised share",
        f"{share:.0%} of the tokens{_decoded(probe, on)}",
        "above 0 %, below 100 %" if prompts else "above 0 %",
        "not declared" if unknown else share > 0 and (share < 1 or not prompts),
        "Everything is supervised. Declare all_supervised=True if the prompts are meant to be, or False if not."
        if unknown
        else "Nothing is supervised, or everything is, the prompt included: the chat template marks no assistant span.",
    )
    if share > 0:
        yield from _every_position(probe, on)
        yield from _no_peeking(probe, on)


def _decoded(probe: Probe, on: Tensor) -> str:
    ids = probe.step.value("ids")
    if probe.step.tokenizer is None or ids is None or ids.shape != on.shape:
        return ""
    return f"; row 0: {probe.step.tokenizer.decode(ids[0][on[0]].tolist())!r}"


def _every_position(probe: Probe, on: Tensor) -> Iterator[Finding]:
    """Change the signal of one supervised token at a time: the first, a middle and the last one of a few rows."""
    step = probe.step
    role = next((r for r in ("labels", "advantages", "behaviour", "teacher") if _per_token(probe, r, on)), None)
    if role is None:
        yield not_declared("CV", "every supervised position", "labels, or a signal with one value a token")
        return
    key = step.roles[role]
    fitting = edits.fit(on, step.batch[key])
    assert fitting is not None
    flat = fitting if fitting.ndim == 2 else fitting.flatten(2).any(-1)
    if role == "labels" and _in_place(probe, on):  # nothing stands before a row's first token to predict it from
        flat = flat.clone()
        flat[:, 0] = False
    weighed = flat & _with_advantage(probe, role, flat)
    idle = int((flat.any(-1) & ~weighed.any(-1)).sum())
    aside = f"; {idle} rows without an advantage are left out" if idle else ""
    flat = weighed
    if not bool(flat.any()):
        yield Finding("CV", "every supervised position", f"no position to ask{aside}", "-", "not applicable")
        return
    silent: list[str] = []
    tried = 0
    quick = _slopes(probe, role, flat)
    if quick is not None:
        yield LAW.finding("every supervised position", f"all {quick} matter (through {key!r}){aside}", "all", True)
        return
    for row in flat.any(-1).nonzero()[:ROWS, 0].tolist():
        places = flat[row].nonzero()[:, 0].tolist()
        for place, what in {places[0]: "first", places[-1]: "last"}.items():
            only = torch.zeros_like(flat)
            only[row, place] = True
            tried += 1
            if not _felt(probe, role, only):
                silent.append(f"the {what} one of row {row}")
    yield LAW.finding(
        "every supervised position",
        f"{tried - len(silent)} of {tried} matter (through {key!r}){aside}",
        "all",
        not silent,
        f"{', '.join(silent[:4])} is in the mask and not in the gradient: the last (end-of-turn) token is cut off by "
        "a shift or masked because its id equals the padding's.",
    )


def _with_advantage(probe: Probe, role: str, flat: Tensor) -> Tensor:
    """Where the advantage is 0 (a group without variance) neither labels nor behaviour can matter to a policy
    gradient; other signals are terms of their own, and advantages themselves are given another value."""
    value = probe.step.value("advantages")
    if value is None or role not in ("labels", "behaviour"):
        return torch.ones_like(flat)
    on = value != 0
    return on if on.shape == flat.shape else on.reshape(len(on), -1).any(-1, keepdim=True).expand_as(flat)


def _slopes(probe: Probe, role: str, flat: Tensor) -> int | None:
    """How many positions there are, if the loss has a slope by the signal at every one of them; None: look closer."""
    value: Tensor = probe.step.batch[probe.step.roles[role]]
    if not value.is_floating_point():
        return None
    slope = probe.slope(role, probe.step.batch)
    if slope is None:
        return None
    felt = slope != 0 if slope.ndim == 2 else (slope != 0).flatten(2).any(-1)
    return int(flat.sum()) if bool(felt[flat].all()) else None


def _felt(probe: Probe, role: str, only: Tensor) -> bool:
    """Whether any other value of this one token's signal changes the gradient; the opposite advantages are tried
    last."""
    for base in (probe.step.batch, edits.opposite(probe.step, probe.step.batch)):
        if base is None:
            continue
        origin = probe.gradient(base)
        if any(probe.differs(origin, probe.gradient(changed)) for changed in _changes(probe, dict(base), role, only)):
            return True
    return False


def _no_peeking(probe: Probe, on: Tensor) -> Iterator[Finding]:
    """A row's last supervised label is predicted from what stands before it: its own input token must not matter."""
    step = probe.step
    if step.rows_interact:
        return  # a term over all tokens (load balancing) reads the last input lawfully
    ids = step.value("ids")
    if ids is None or not _in_place(probe, on):
        # Only where labels stand at their own place; shifted ones are told apart by nothing.
        yield Finding("CV", PEEKING, "labels do not stand where their tokens do", "-", "not applicable")
        return
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    last = torch.where(on, places, -1).amax(-1, keepdim=True)
    shown = step.value("attention")
    final = torch.where(shown != 0, places, -1).amax(-1, keepdim=True) if shown is not None else places[:, -1:]
    at_end = (places == last) & (last == final)
    if not bool(at_end.any()):
        yield Finding("CV", PEEKING, "no row ends with a supervised token", "-", "not applicable")
        return
    other = ids.roll(1, dims=0) if len(ids) > 1 else ids.roll(1, dims=-1)
    changed = {**step.batch, step.roles["ids"]: torch.where(at_end, other, ids)}
    change = probe.gradient().distance(probe.gradient(changed))
    yield LAW.finding(
        PEEKING,
        f"changing the rows' last input moved the gradient by {change:.2g}",
        f"≤ {probe.tolerance:.1g}",
        change <= probe.tolerance,
        "The token that is to be predicted is in the input that predicts it: logits and labels are shifted against "
        "each other.",
    )


def _in_place(probe: Probe, on: Tensor) -> bool:
    """Whether labels stand where their tokens do, so that the loss shifts them."""
    ids, labels = probe.step.value("ids"), probe.step.value("labels")
    return ids is not None and labels is not None and ids.shape == labels.shape and bool((labels == ids)[on].all())


def _per_token(probe: Probe, role: str, on: Tensor) -> bool:
    value = probe.step.value(role)
    return value is not None and edits.fit(on, value) is not None


def _changes(probe: Probe, base: edits.Batch, role: str, only: Tensor) -> Iterator[edits.Batch]:
    """Other values for one token, of which at least one must be felt. A clipped token is silent under its own
    advantage and speaks under the opposite one; a ratio just outside its clip comes back inside from one side."""
    step, key = probe.step, probe.step.roles[role]
    old: Tensor = base[key]
    where = only
    while where.ndim < old.ndim:
        where = where[..., None]
    if role == "labels":
        other = old[old >= 0]
        fresh = other[other != old[only][0]]
        yield {**base, key: torch.where(only, fresh[0] if len(fresh) else old[only][0] + 1, old)}
    elif role == "advantages":
        for new in (torch.where(old == 0, torch.ones_like(old), -old), old + 1):
            yield {**base, key: torch.where(where, new, old)}
    elif role == "behaviour":
        for shift in (-0.05, 0.05, -0.5, 0.5):
            yield {**base, key: torch.where(where, (old + shift).clamp(max=-1e-4), old)}
    else:
        yield edits.perturb(step, base, role, edits.generator(step, 77), where=where.expand_as(old))


LAW = Law(
    code="CV",
    name="coverage",
    sentence="Every supervised position matters, the terminal token too, and the supervised share is neither 0 nor 1.",
    needs="roles mask or labels; ids and tokenizer to show the span",
    how="The signal of single supervised tokens is changed, and each must move the gradient.",
    traps="A token whose ratio is clipped is silent by design under one sign of its advantage, so both are tried. Rows "
    "of advantage 0 are silent under both, and left out.",
    caught="Megatron-Bridge #3359, marin #7237, TRL #4201, end-of-turn tokens masked because pad = eos",
    check=check,
    quick=False,
)
