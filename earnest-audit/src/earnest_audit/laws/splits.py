"""SE: Permuting, repeating or cutting the rows (unevenly) does not change the gradient, up to the normaliser.

permuted rows     the same gradient
every row twice   the same gradient (reduction="mean"), twice it ("sum"); undeclared, or something in between
whole = parts     g(B₁ ∪ B₂) = α·g(B₁) + β·g(B₂), α and β ≥ 0, for an UNEVEN cut: rows are independent

Needs: a batch of at least two rows (for the doubling, of one with a declared reduction)
How: Gradients of the permuted, the doubled and the unevenly cut batch.
Exceptions: Terms with different normalisers are no sum of the parts together: declared ones are checked one by one;
undeclared ones are "not declared" where the sum holds with equally many tokens in every row. A loss that couples rows
by definition declares rows_interact=True. Without any declared role, rows that fail are "not declared" in audit(model,
loss, batch), and in a Step where the rows may not be first (time first).
Warns: (whole = parts, where only terms fail whose weights have no metric, and no signal is declared) a term that is
a sum of means over counts that no role declares (the depths of a multi-token prediction).
Detects: OpenRLHF #1250, verl #1440, transformers gradient accumulation, prime-rl #600
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.gradient import Gradient, Span, span
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.laws.parts import Part, parts
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.verdict import UNCHECKED

ALL = Part({})  # of the loss
PERMUTED, TWICE, WHOLE = "permuted rows", "every row twice", "whole = parts"
ROWS = "rows_interact=False if rows are first and independent, True if not (in-batch negatives, time first),"
# What doubling the rows multiplies the gradient by; undeclared, a root of the count or a sum beside a constant may be.
COUNTED = {"mean": (0.99, 1.02), "sum": (1.98, 2.02), None: (0.99, 2.02)}
EXPECTED = {"mean": '1×, reduction="mean"', "sum": '2×, reduction="sum"', None: "1× to 2×"}


def check(probe: Probe) -> Rows:
    for row in _rows(probe):
        judged = row.outcome != "fails" and not row.measured.startswith(UNCHECKED)
        yield row if judged or probe.step.rows_interact is not None else LAW.not_declared(row.subject, ROWS)


def _rows(probe: Probe) -> Rows:
    step = probe.step
    if step.rows < 2:
        yield LAW.not_applicable("rows", f"{step.rows} row", "A batch of one row has no order.")
        if step.reduction is not None and probe.gradient().finite():
            yield from probe.tried({TWICE: _twice(probe, probe.gradient())})
        return
    whole = probe.gradient()
    LAW.needs(whole.finite(), "rows", "the gradient is not finite", "See GL.")
    order = torch.randperm(step.rows, generator=edits.generator(step, 3))
    if torch.equal(order, torch.arange(step.rows)):
        order = order.roll(1)
    both = whole.times(0.0)
    with suppress(Exception):  # twice the rows may be refused where another order is not
        both = probe.gradient(edits.take_rows(step, torch.cat([order, order])))
    factor, rest, holds = probe.scales(both, whole, *COUNTED[step.reduction])
    if holds:
        measured = f"{factor:.3g}× the same up to {rest:.2g}"
        yield LAW.finding("permuted, and every row twice", measured, EXPECTED[step.reduction], True)
    elif probe.random:
        raise Ends(probe.redrawn("permuted, repeated or cut rows"))
    else:  # one at a time, to find which
        yield from probe.tried({PERMUTED: _order(probe, order), TWICE: _twice(probe, whole)})
    yield from map(probe.fair, _parts(probe))


def _order(probe: Probe, order: Tensor) -> Rows:
    shuffled = probe.change(edits.take_rows(probe.step, order))
    if shuffled > probe.tolerance:
        LAW.needs(not probe.step.rows_interact, PERMUTED, "rows interact by declaration")
    yield probe.same(
        PERMUTED, shuffled,
        "The order of the rows matters: something is paired by place (a permutation that is not undone), or broadcast "
        "along the wrong axis. Where rows belong together by place (stacked pairs), declare rows_interact=True.",
    )  # fmt: skip


def _twice(probe: Probe, whole: Gradient) -> Rows:
    step = probe.step
    factor, rest, holds = probe.scales(probe.gradient(edits.repeat_rows(step)), whole, *COUNTED[step.reduction])
    measured = f"the gradient is {factor:.3g}× the same up to {rest:.2g}"
    # An unbiased deviation over the batch, or a baseline that leaves one out, depends on the number of rows.
    LAW.needs(holds or not (step.rows_interact or step.grouped), TWICE, f"{measured}, rows interact")
    yield LAW.finding(
        TWICE, measured, EXPECTED[step.reduction], holds,
        "Doubling the batch turns the gradient, or scales it otherwise than the reduction does: the normaliser is no "
        "count of what is summed, or is applied twice. Rows that are coupled on purpose: rows_interact=True.",
    )  # fmt: skip


def _parts(probe: Probe) -> Rows:
    step = probe.step
    LAW.needs(not step.rows_interact, WHOLE, "rows interact by declaration")
    with probe.may_refuse(WHOLE, "a part of the rows cannot be run alone"):
        found = _cut(probe, step)
    if found is None:
        raise Ends(LAW.not_applicable(WHOLE, "a part has no finite gradient alone"))
    outcome = found.within(probe.tolerance)
    measured = f"{found.alpha:.3g}·g₁ + {found.beta:.3g}·g₂ is off by {found.rest:.2g}"
    expected = f"≤ {probe.tolerance:.2g}, no weight below 0"
    LAW.needs(outcome or not step.grouped, WHOLE, measured, "Rows of a group are coupled by their rewards.")
    off = None if outcome or not step.terms_off else _terms_off(probe)
    if off == []:
        outcome, measured = True, f"{measured}; every term by itself is a sum of its parts"
    plain = step.roles.keys().isdisjoint(edits.INPUTS)  # else a signal may be broadcast over the rows
    doubted = plain and off and set(off) <= set(step.switches)
    if not outcome and not doubted and (even := _even(probe)) is not None and even.within(probe.tolerance):
        # Where every row has as many tokens, a mean over rows and one over tokens are the same.
        raise Ends(LAW.finding(
            f"{WHOLE} (uneven)", f"{measured}; with equally many tokens in every row by {even.rest:.2g}", expected,
            "not declared",
            "Terms have normalisers of their own. Declare metrics={name: Metric(weight=setting)}, and each is checked.",
        ))  # fmt: skip
    row = LAW.finding(
        f"{WHOLE} (uneven)", measured, expected, outcome,
        "The parts' gradients do not add up to the batch's: rows depend on each other (a broadcast, a wrong axis, "
        "attention across rows). If on purpose, or if a term divides by a count without a role: rows_interact=True.",
    )  # fmt: skip
    yield LAW.doubtful(row) if doubted else row


def _terms_off(probe: Probe) -> list[str] | None:
    """The weights of declared terms ("" for what is left without them) that by themselves are no sum of their parts;
    None where they cannot be evaluated one by one."""
    found: dict[str, bool] = {}
    for part in parts(probe, *(k for k in probe.step.terms_off if not probe.step.pure.get(k))):
        try:
            size = part.gradient(probe, None).norm()
            room = probe.tolerance * max(1.0, part.scale(probe, None) / max(size, 1e-300))
            if room < 0.5:  # else too little remains of the loss here to judge
                cut = _cut(probe, probe.step, part)
                found[part.term] = cut is not None and cut.within(room)
        except Exception:
            return None
    return [term for term, holds in found.items() if not holds] if len(found) > 1 else None


def _even(probe: Probe) -> Span | None:
    """The cut of the rows with equally many tokens each; None where the loss refuses them, or trains on none."""
    with suppress(Exception):  # the cut of the original rows reports what the loss refuses
        batch = edits.even(probe.step)
        found = None if batch is None else _cut(probe, replace(probe.step, batch=batch))
        return None if found is None or found.alpha == found.beta == found.rest == 0 else found
    return None


def _cut(probe: Probe, step: Step, part: Part = ALL) -> Span | None:
    """The gradient as a combination of those of a third of the rows and of the others; None where one is not finite."""
    third, rows, whole = max(1, step.rows // 3), torch.arange(step.rows), part.gradient(probe, step.batch)
    pieces = []
    for some in (rows[:third], rows[third:]):  # kept: the terms of a loss share what is left without them
        batch = probe.kept(f"rows {some.tolist()} of {id(step.batch)}", partial(edits.take_rows, step, some))
        pieces.append(part.gradient(probe, batch))
    return span(whole, *pieces) if all(p.finite() for p in pieces) else None


LAW = Law("SE", "splits", __doc__, check, quick=False, perturbed=True)
