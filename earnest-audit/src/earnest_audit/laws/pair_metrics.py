"""MR-PAIR: Accuracy and margin of a pair agree with the side that the loss prefers, and a log-prob metric belongs to
the side that it is named for.

L(chosen, rejected) < L(rejected, chosen)   ⟺   margin > 0 and accuracy = 1, for one pair alone

Needs: roles chosen and rejected; a metric named accuracy or margin; logprobs=fn for metrics named logps
How: Single pairs, as they are and with their sides swapped: which costs less, and what do the metrics show?
Exceptions: Other declared terms are switched off; undeclared ones may outweigh the preference in some pairs. A metric
whose sign does not change with the sides is not checked.
Detects: an accuracy that is 1 - accuracy, a margin of rejected minus chosen, LLaMA-Factory #6050 (logps swapped)
"""

from __future__ import annotations

import re

import torch

from earnest_audit import edits
from earnest_audit.law import Law, Rows
from earnest_audit.laws.pairs import swapped
from earnest_audit.probe import Probe

RIGHT = {"accuracy", "accuracies", "acc"}
WIDE = {"margin", "margins"}
PAIRS = 3


def check(probe: Probe) -> Rows:
    step = probe.step
    yield from _own_side(probe)
    names = {n: 0.0 if words & WIDE else 0.5 for n in probe.look().metrics
             if (words := set(re.split(r"[^a-z]+", n.lower()))) & (RIGHT | WIDE)}  # fmt: skip
    if not names:
        return
    seen: dict[str, list[bool]] = {name: [] for name in names}
    with probe.perturbed(0.5):
        for row in range(min(PAIRS, step.rows)):
            one = edits.take_rows(step, torch.tensor([row]))
            with probe.may_refuse("metrics of a pair", "one pair alone cannot be run"):
                here, there = (probe.look(b, step.terms_off) for b in (one, swapped(step, one)))
            gap = there.loss - here.loss
            if abs(gap) <= probe.tolerance * max(abs(here.loss), abs(there.loss)):
                continue
            for name, centre in names.items():
                a, b = here.metrics[name] - centre, there.metrics[name] - centre
                if a * b < 0:  # it distinguishes the two sides
                    seen[name].append((a > 0) == (gap > 0))
    for name, agree in seen.items():
        if len(agree) > 1:  # a term beside the preference may outweigh it in a pair; reversed, it is wrong in all
            yield probe.descends(
                f"metric {name}, which side", f"{sum(agree)} of {len(agree)} pairs as the loss has it", sum(agree),
                f"{name} prefers the answers that the loss makes less likely: a comparison is reversed, or chosen "
                "and rejected are swapped in one of the two.",
            )  # fmt: skip


def _own_side(probe: Probe) -> Rows:
    """A log-prob metric that is named for one side is not the other side's, as a sum or as a mean over tokens."""
    step, found = probe.step, probe.look().metrics
    names = {n: sides for n in found if len(sides := [s for s in edits.SIDES if s in n.lower()]) == 1
             and re.search(r"log_?p", n.lower())}  # fmt: skip
    if step.logprobs is None or not names:
        return
    known: dict[str, list[float]] = {}
    for side, values in zip(edits.SIDES, probe.forward(step.logprobs, graph=False), strict=True):
        mask = step.value(f"{side}_mask")
        forms = [values] if mask is None or values.ndim > 1 else [values, values / mask.sum(-1).clamp_min(1)]
        known[side] = [float(form.double().mean()) for form in forms]
    room = max(1e-3, probe.tolerance)
    for name, (side,) in names.items():
        other = next(s for s in edits.SIDES if s != side)
        off = {s: min(abs(found[name] - k) / max(abs(k), 1e-12) for k in known[s]) for s in edits.SIDES}
        if min(off.values()) <= room:
            yield LAW.finding(
                f"metric {name}, whose",
                f"{found[name]:.4g}, off by {off[side]:.1g} of the {side} and {off[other]:.1g} of the {other} answers'",
                f"the {side} answers'", off[side] <= max(room, off[other]),
                f"{name} is the mean of the {other} answers: the two are swapped on the way to the log.",
            )  # fmt: skip


LAW = Law(
    "MR-PAIR", "pair metrics", __doc__, check, quick=False, tier="contrib",
    when=lambda step: {"chosen", "rejected"} <= step.roles.keys() and step.pairwise,
)  # fmt: skip
