"""MR-PAIR: Accuracy and margin of a pair agree with the side that the loss prefers.

L(chosen, rejected) < L(rejected, chosen)   ⟺   margin > 0 and accuracy = 1, for one pair alone

Needs: roles chosen and rejected; a metric named accuracy or margin
How: Single pairs, as they are and with their sides swapped: which costs less, and what do the metrics show?
Exceptions: Other declared terms are switched off; undeclared ones may outweigh the preference in some pairs. A metric
whose sign does not change with the sides is not checked.
Detects: an accuracy that is 1 - accuracy, a margin of rejected minus chosen
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
    names = {n: 0.0 if words & WIDE else 0.5 for n in probe.look().metrics
             if (words := set(re.split(r"[^a-z]+", n.lower()))) & (RIGHT | WIDE)}  # fmt: skip
    if not names:
        return
    seen: dict[str, list[bool]] = {name: [] for name in names}
    with probe.perturbed(0.5):
        for row in range(min(PAIRS, step.rows)):
            one = edits.take_rows(step, torch.tensor([row]))
            with probe.may_refuse("metrics of a pair", "one pair alone cannot be run"):
                here, there = (probe.look(b, probe.quiet) for b in (one, swapped(step, one)))
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


LAW = Law(
    "MR-PAIR", "pair metrics", __doc__, check, quick=False,
    when=lambda step: {"chosen", "rejected"} <= step.roles.keys() and step.pairwise,
)  # fmt: skip
