"""MR-MEAN: A metric that is an average does not depend on the number of rows or on the padding.

every row twice          the same number; or as many times as the loss itself, where that is a sum
3 columns of padding     the same number
ids after the labels    the same number, where labels are a tensor of their own

Needs: a step that returns (loss, metrics) under usual names, or declared metrics; ids and a mask (or attention) for
padding; ids beside labels
How: Metrics of the batch with every row twice, with more padding, and with other ids from the rows' last labels on.
Exceptions: Where the loss itself is a sum, its metrics may be sums; for others declare Metric(average=False).
Warns: (rows "other ids from the last label on") a metric that is meant to be taken on all tokens.
Detects: TRL #6121 (an entropy that counts padding) and #5620 (one of the wrong positions), a KL that is summed and
logged as a mean
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Law, Rows
from earnest_audit.laws import shift
from earnest_audit.laws.masks import WIDE
from earnest_audit.measure import Reading
from earnest_audit.probe import Probe
from earnest_audit.verdict import Finding


def check(probe: Probe) -> Rows:
    step = probe.step
    names = [name for name, m in probe.metrics.items() if m.average]
    LAW.needs(names, "averages", "no metric that is known to be one")
    with probe.perturbed():
        here = probe.look()
        tokens = step.value("ids") is not None and edits.supervised(step) is not None
        if tokens or edits.by_attention(step) or {"chosen_mask", "rejected_mask"} <= step.roles.keys():
            padded = (partial(_compare, probe, "3 more columns of padding", names, here, edits.pad(step, keys=keys))
                      for keys in edits.readings(step))  # fmt: skip
            yield probe.guessed("averages, 3 more columns of padding", padded, WIDE)
        if step.rows > 1 and not step.rows_interact:
            twice = partial(_compare, probe, "every row twice", names, here, edits.repeat_rows(step))
            yield probe.guessed("averages, every row twice", [twice], WIDE)
        if "labels" in step.roles and shift.predicts(step) and (batch := _after_labels(probe)) is not None:
            subject = "other ids from the last label on"
            yield LAW.doubtful(_compare(probe, subject, names, here, batch, probe.value_room))


def _after_labels(probe: Probe) -> edits.Batch | None:
    """Other ids after the token that predicts a row's last label: no supervised token sees them."""
    step, found = probe.step, shift.last_labels(probe)
    if isinstance(found, str):
        return None
    ids: Tensor = step.batch[step.roles["ids"]]
    where = (torch.arange(ids.shape[1], device=ids.device)[None] > found[1]) & (ids >= 0)
    return {**step.batch, step.roles["ids"]: edits.other_ids(step, ids, where)} if bool(where.any()) else None


def _compare(
    probe: Probe, subject: str, names: list[str], here: Reading, batch: edits.Batch, near: float = 0.0
) -> Finding:
    there = probe.look(batch)
    relative = near or max(1e-3, probe.tolerance)
    grown = there.loss / here.loss if here.loss else 1.0
    off = []
    for name in (n for n in names if n in there.metrics):
        was, now = here.metrics[name], there.metrics[name]
        # A mean of what cancels is as exact as its parts, which are a few nats.
        room = relative * max(abs(was), abs(now)) + min(32 * probe.coarsest, max(1e-4, probe.coarsest))
        if abs(now - was) > room and abs(now - grown * was) > room:
            off.append(f"{name} {was:.4g} → {now:.4g}")
    return probe.fair(LAW.finding(
        f"averages, {subject}", "; ".join(off) or f"{len(names)} metrics stay", f"the same, within {relative:.1g}",
        not off,
        "An average that changes with rows or padding is not divided by what it sums over, or sums more than what is "
        "supervised. One that changes with ids after the last label is taken at other positions.",
    ))  # fmt: skip


LAW = Law("MR-MEAN", "averages", __doc__, check, quick=False, spare=2 / 3)
