"""MR-PAIR: Accuracy and margin of a pair agree with the side that the loss prefers.

L(chosen, rejected) < L(rejected, chosen)   ⟺   margin > 0 and accuracy = 1, for one pair alone
margin = chosen - rejected                  for metrics with these usual names

Needs: roles chosen and rejected; a metric named accuracy or margin
How: Single pairs, as they are and with their sides swapped: which costs less, and what do the metrics show?
Exceptions: Other declared terms are switched off; undeclared ones may outweigh the preference in some pairs. A metric
whose sign does not change with the sides is not checked.
Warns: (a margin whose name lacks a word of its pair's, as "margin" beside "chosen_reward") a margin in another unit.
Detects: an accuracy that is 1 - accuracy, a margin of rejected minus chosen, tinker-cookbook #172 (β twice)
"""

from __future__ import annotations

import re

import torch

from earnest_audit import edits
from earnest_audit.law import Law, Rows
from earnest_audit.laws.pairs import swapped
from earnest_audit.limits import ROUNDED
from earnest_audit.measure import Reading
from earnest_audit.probe import Probe

RIGHT = {"accuracy", "accuracies", "acc"}
WIDE = {"margin", "margins"}
PAIRS = 3


def check(probe: Probe) -> Rows:
    step = probe.step
    names = {n: 0.0 if words & WIDE else 0.5 for n in probe.look().metrics if (words := _words(n)) & (RIGHT | WIDE)}
    if not names:
        return
    seen: dict[str, list[bool]] = {name: [] for name in names}
    shown: list[Reading] = []
    with probe.perturbed(0.5):
        for row in range(min(PAIRS, step.rows)):
            one = edits.take_rows(step, torch.tensor([row]))
            with probe.may_refuse("metrics of a pair", "one pair alone cannot be run"):
                shown += [probe.look(b, probe.quiet) for b in (one, swapped(step, one))]
            here, there = shown[-2:]
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
    yield from _differences(probe, shown)


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z]+", name.lower())) - {""}


def _differences(probe: Probe, shown: list[Reading]) -> Rows:
    """|margin| = |chosen - rejected| of some pair of metrics; for a pair alone a mean is the pair's own value."""
    found = {name: _words(name) for name in (shown[0].metrics if shown else ())}
    for margin, words in found.items():
        both = [(c, r) for c, w in found.items() for r, v in found.items()
                if words & WIDE and words - WIDE <= w and "chosen" in w and v == w ^ set(edits.SIDES)]  # fmt: skip
        offs = [[abs(abs(s.metrics[margin]) - abs(s.metrics[c] - s.metrics[r])) for s in shown] for c, r in both]
        if both:
            scale = max(abs(s.metrics[name]) for s in shown for name in (margin, *both[0]))
            row = LAW.agrees(
                f"metric {margin}, the difference", min(map(max, offs)), 4 * max(ROUNDED, probe.coarsest) * scale,
                f"{margin} is not {both[0][0]} - {both[0][1]}: a factor is applied twice or is missing, or one of the "
                "three is another quantity.",
            )  # fmt: skip
            yield row if any(words - WIDE == found[c] - {"chosen"} for c, _ in both) else LAW.doubtful(row)


LAW = Law(
    "MR-PAIR", "pair metrics", __doc__, check, quick=False,
    when=lambda step: {"chosen", "rejected"} <= step.roles.keys() and step.pairwise is not False,
)  # fmt: skip
