"""MR-PAIR: Accuracy and margin of a pair agree with the side that the loss prefers, and log-probs belong to the side
that they are named for.

L(chosen, rejected) < L(rejected, chosen)   ⟺   margin > 0 and accuracy = 1, for one pair alone
margin = chosen - rejected                  for the two metrics that Metric(kind="margin", of=(…, …)) names

Needs: roles chosen and rejected; a metric of the kind accuracy, margin, or chosen or rejected log-probs; logprobs=fn
How: Single pairs, as they are and with their sides swapped: which costs less, and what do the metrics show? One pair
that agrees, in one of three states, is enough: an undeclared term, or lengths, may outweigh the preference.
Exceptions: A metric whose sign does not change with the sides is not checked.
Warns: (undeclared log-probs; an undeclared margin whose name lacks a word of its pair's, as "margin" beside
"chosen_reward") a margin in another unit, and log-probs of another model.
Detects: an accuracy that is 1 - accuracy, a margin of rejected minus chosen, tinker-cookbook #172 (β twice),
LLaMA-Factory #6050 (log-probs swapped)
"""

from __future__ import annotations

import torch

from earnest_audit import edits
from earnest_audit.law import Law, Rows
from earnest_audit.laws.pairs import swapped
from earnest_audit.limits import ROUNDED
from earnest_audit.measure import Reading
from earnest_audit.probe import Probe

CENTRES: dict[str | None, float] = {"accuracy": 0.5, "margin": 0.0}
PAIRS = 3


def check(probe: Probe) -> Rows:
    step = probe.step
    yield from _own_side(probe)
    names = {n: CENTRES[m.kind] for n, m in probe.metrics.items() if m.kind in CENTRES}
    seen: dict[str, list[bool]] = {name: [] for name in names}
    shown: list[Reading] = []
    states = (probe.perturbed(0.5), probe.perturbed(2.0), probe.opposite())
    for state in states if names else ():
        with state:
            for row in range(min(PAIRS, step.rows)):
                one = edits.take_rows(step, torch.tensor([row]))
                with probe.may_refuse("metrics of a pair", "one pair alone cannot be run"):
                    shown += [probe.look(b, probe.quiet) for b in (one, swapped(step, one))]
                here, there = shown[-2:]
                gap = there.loss - here.loss
                clear = abs(gap) > probe.tolerance * max(abs(here.loss), abs(there.loss))
                for name, centre in names.items():
                    a, b = here.metrics[name] - centre, there.metrics[name] - centre
                    if clear and a * b < 0:  # it distinguishes the two sides
                        seen[name].append((a > 0) == (gap > 0))
        if all(any(agree) for agree in seen.values() if agree):
            break
    for name, agree in seen.items():
        if len(agree) > 1:
            yield probe.descends(
                f"metric {name}, which side", f"{sum(agree)} of {len(agree)} pairs as the loss has it", sum(agree),
                f"{name} prefers the answers that the loss makes less likely: a comparison or the sides are swapped.",
            )  # fmt: skip
    yield from _differences(probe, shown)


def _differences(probe: Probe, shown: list[Reading]) -> Rows:
    """|margin| = |chosen - rejected| of its two metrics, of one pair alone."""
    for margin, m in probe.metrics.items():
        if m.of and shown:
            three = [[s.metrics[name] for name in (margin, *m.of)] for s in shown]
            scale = max(abs(v) for values in three for v in values)
            row = LAW.agrees(
                f"metric {margin}, the difference", max(abs(abs(d) - abs(c - r)) for d, c, r in three),
                4 * max(ROUNDED, probe.coarsest) * scale,
                f"{margin} is not {m.of[0]} - {m.of[1]}: a factor is missing or applied twice, or one is misnamed.",
            )  # fmt: skip
            yield LAW.doubtful(row) if "of" in m.unsure else row


def _own_side(probe: Probe) -> Rows:
    """A metric of one side's log-probs is not the other's, as a sum or as a mean over tokens."""
    step, found = probe.step, probe.look().metrics
    names = {name: side for name, m in probe.metrics.items() for side in edits.SIDES if m.kind == f"{side} log-probs"}
    if step.logprobs is None or not names:
        return
    known, room = {}, max(ROUNDED, probe.tolerance)
    for side, values in zip(edits.SIDES, probe.forward(step.logprobs, graph=False), strict=True):
        mask = step.value(f"{side}_mask")
        count = 1 if mask is None else mask.sum(-1).clamp_min(1)
        known[side] = float(values.double().mean()), float((values / count).double().mean())
    for name, side in names.items():
        (other,) = {*edits.SIDES} - {side}
        own, others = (min(abs(found[name] - k) / max(abs(k), 1e-12) for k in known[s]) for s in (side, other))
        if min(own, others) <= room:
            row = LAW.finding(
                f"metric {name}, whose", f"{own:.1g} off the {side} and {others:.1g} off the {other} answers'",
                f"the {side} answers'", own <= max(room, others),
                f"{name} is the mean of the {other} answers: the two are swapped on the way to the log.",
            )  # fmt: skip
            yield LAW.doubtful(row) if "kind" in probe.metrics[name].unsure else row


LAW = Law(
    "MR-PAIR", "pair metrics", __doc__, check, quick=False,
    when=lambda step: {"chosen", "rejected"} <= step.roles.keys() and step.pairwise is not False,
)  # fmt: skip
