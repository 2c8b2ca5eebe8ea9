"""CV: Every supervised position has a gradient, the terminal token too, and the supervised share is neither 0 nor 1.

Needs: roles mask or labels; ids and tokenizer to show the span
How: At each module's output that is nearest to the loss and has the rows, as many positions of a row have a gradient as
tokens of it are supervised, apart from a first one that nothing predicts. Where no output shows that, the declared
terms are set to 0 (a term may be taken on other tokens); where none does then (a fused loss), some tokens are
supervised alone, and the row is "a sample of supervised positions".
Exceptions: A clipped token has a zero gradient by design, so it needs one in one of several states: the opposite
advantages (or rewards), wide bounds, ratio 1; for a critic, returns far above and below. Rows and tokens of weight or
advantage 0 are left out, and rows without any gradient. A loss that drops tokens on purpose declares drops_tokens=True.
Where rows interact (a mean over all tokens is taken off), one token alone may have none. Answers that branch off one
prompt are predicted by one output, so fewer outputs than tokens have a gradient: some are supervised alone.
Detects: ms-swift #7838, Megatron-Bridge #3359, marin #7237, TRL #4201, end-of-turn tokens masked because pad = eos
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

from earnest_audit import edits, logits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.verdict import Finding

ROWS = 2
UNCLIPPED = 1e3  # a clip range that no ratio of a batch leaves
POSITIONS, SAMPLE = "every supervised position", "a sample of supervised positions"
NONE, DROPPED = "no position to check", "some, tokens are dropped by declaration"
WHY = ": in the mask, not in the gradient. A shift cuts a token off, a turn is left out, or an end-of-turn is taken "
WHY += "for padding. If the loss leaves out tokens or rows on purpose, declare drops_tokens=True."


def check(probe: Probe) -> Rows:
    step = probe.step
    on = edits.supervised(step)
    if on is None:
        if step.kind != "preference":  # what is not in an answer's gradient, laws IG and MI see
            yield LAW.not_declared("supervised positions", 'roles={"mask": …} or {"labels": …}')
        return
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
        else "Nothing is supervised, or everything is, the prompt included: the chat template marks no assistant span. "
        "Where prompts are meant to be supervised (pre-training), declare all_supervised=True.",
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
    sure = _sure(step, on)
    idle, count = int((on.any(-1) & ~sure.any(-1)).sum()), int(sure.sum())
    aside = f"; {idle} rows without an advantage or a token before are left out" if idle else ""
    if not count:
        return LAW.not_applicable(POSITIONS, NONE + aside)
    if (short := _short(probe, on, {})) is None and probe.quiet:  # a term may be taken on other tokens
        short = _short(probe, on, probe.quiet)
    if short is None or (bool(short.any()) and _branches(step, on)):
        return _by_trial(probe, sure if "labels" in step.roles else sure & ~(on[:, :1] & ~sure[:, :1]), aside)
    part = (short > 0) & (short < sure.sum(-1))  # whole rows may be left out, as one without a teacher
    rows = [f"{int(short[row])} of row {row}" for row in part.nonzero()[:, 0]]
    measured = f"{count - int(short.sum())} of {count} have a gradient" if bool(short.any()) else f"all {count} matter"
    expected = DROPPED if step.drops_tokens else "all, in rows that have any" if bool(short.any()) else "all"
    return LAW.finding(POSITIONS, measured + aside, expected, not rows or step.drops_tokens, ", ".join(rows[:3]) + WHY)


def _branches(step: Step, on: Tensor) -> bool:
    """Whether supervised tokens of a row share a position, as answers do that branch off one prompt."""
    where = step.value("positions")
    if where is None or where.shape != on.shape:
        return False
    return any(len(p[o].unique()) < o.sum() for p, o in zip(where, on, strict=True))


def _short(probe: Probe, on: Tensor, off: Mapping[str, float]) -> Tensor | None:
    """How many supervised tokens of every row have no gradient in any state [B], counted at the outputs nearest to the
    loss; None where there is none, or where the loss also reads other positions."""
    found: dict[nn.Module, Tensor] = {}
    most, short = on.sum(-1), None
    for batch, knobs in _states(probe):
        try:
            shown = logits.positions(probe, batch, {**off, **knobs}, on)
        except Exception as error:  # what the step refuses shows nothing
            if knobs and edits.opposite(probe.step, batch) is None:
                raise Ends(LAW.not_declared(POSITIONS, "advantages or rewards")) from error
            continue
        found |= {module: found.get(module, there) | there for module, there in shown.items()}
        # Where prompts stand in front of what the mask marks, they predict its first tokens.
        counts = [(t.sum(-1), t.shape[-1] > on.shape[1] and not bool(t[0, :, 0].any())) for t in found.values()]
        left = [(_sure(probe.step, on, prefixed).sum(-1) - c[1]).clamp(min=0)
                for c, prefixed in counts if bool((c[0] <= most).all())]  # fmt: skip
        short = torch.stack(left).amin(0) if left else None
        if short is None or not bool(short.any()):
            return short
        if len(left) < len(counts):
            return None
    return short


def _states(probe: Probe) -> Iterator[tuple[edits.Batch, Mapping[str, float]]]:
    """A clipped token has a gradient in one of these, and what is below a last layer that is 0."""
    step, base = probe.step, dict(probe.step.batch)
    other = edits.opposite(step, base)
    both = [b for b in (base, other) if b is not None]
    yield from ((batch, {}) for batch in both)
    if acts := [k for k in step.clips if other is None or step.kinds[k] == "bound"]:  # for both signs
        yield from ((batch, dict.fromkeys(acts, UNCLIPPED)) for batch in both)
    if step.logprobs is not None and step.ratio_role in step.roles:
        with suppress(Exception):  # log-probs of another shape
            yield probe.as_policy(base), {}
    if (returns := step.value("returns")) is not None and returns.is_floating_point():
        far = 10 * (1 + float(returns.abs().max()))
        yield from (({**base, step.roles["returns"]: returns + by}, {}) for by in (far, -far))
    with probe.perturbed():
        yield base, {}


def _sure(step: Step, on: Tensor, prefixed: bool = False) -> Tensor:
    """The supervised places that something surely predicts, not a row's or a document's first token, and whose weight
    is not 0."""
    ids, ahead, sure = step.value("ids"), edits.ahead(step), on.clone()
    if not (ahead or prefixed) and (ids is None or ids.shape == on.shape):
        sure[:, 0] = False
    for role in ("advantages", "weights", "importance", "attention", "labels", *(() if ahead else ("documents",))):
        if (value := step.value(role)) is None:
            continue
        there = ~edits.begins(value) if role == "documents" else value != (step.ignore_index if role == "labels" else 0)
        there = there.reshape(*there.shape[:2], -1).any(-1) if there.ndim > 1 else there[:, None]
        gap = on.shape[1] - there.shape[1]
        sure &= nn.functional.pad(there, (gap, 0)) if gap in (-1, 0, 1) else there.any(-1, keepdim=True)
    return sure


def _by_trial(probe: Probe, sure: Tensor, aside: str) -> Finding:
    """Alone, for either sign of the advantages: the first and the last token of a row, and the last of another."""
    step, count, dropped = probe.step, int(sure.sum()), probe.step.drops_tokens
    has_token_signal = {"labels", "behaviour", "teacher"} & step.roles.keys() and "rewards" not in step.roles
    if not (has_token_signal or step.kind == "sft"):
        return LAW.not_declared(POSITIONS, "labels, or a signal with one value per token")
    if not count or not step.empty_rows:
        return LAW.not_applicable(POSITIONS, ("one token alone leaves rows without any" if count else NONE) + aside)
    both = [b for b in (dict(step.batch), edits.opposite(step, step.batch)) if b is not None]
    width = max(step.batch[step.roles[r]].shape[1] for r in ("mask", "labels") if r in step.roles)
    ends = [(row, sure[row].nonzero()[:, 0] - sure.shape[1]) for row in sure.any(-1).nonzero()[:ROWS, 0].tolist()]
    samples = [("first", ends[0][0], ends[0][1][0]), *(("last", row, places[-1]) for row, places in ends)]
    found: dict[str, bool] = {}
    samples = samples if probe.afford(2 * len(samples), keep=9.0) else samples[:1]  # the rest is for later laws
    for what, row, place in samples:
        keep = sure.new_zeros(len(sure), width)
        keep[row, place] = True  # from the right, where all masks are aligned
        with probe.may_refuse(POSITIONS, "one token alone cannot be run"):
            lengths = (probe.gradient(edits.only(step, batch, keep)).norm() for batch in both)
            found[f"the {what} one of row {row}"] = any(0 < length < math.inf for length in lengths)
    missing = [one for one, matters in found.items() if not matters]
    if len(missing) == len(found) and (step.rows_interact or dropped):
        return LAW.not_applicable(POSITIONS, f"no single token alone has a gradient{aside}")
    tried = f"{len(found)} of {count} tried alone, {len(found) - len(missing)} matter{aside}"
    if missing and not dropped:
        return LAW.finding(POSITIONS, tried, "all", False, ", ".join(missing) + WHY)
    return LAW.finding(SAMPLE, tried, DROPPED if dropped else "all tried", True)


LAW = Law("CV", "coverage", __doc__, check, quick=False)
