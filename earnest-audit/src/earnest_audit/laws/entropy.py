"""PG-ENTROPY: An entropy term does not depend on which tokens were sampled.

another id at a row's last supervised place   H = -Σ π log π stays;  -log π(id) moves with the id

Needs: a term whose metric is named entropy; roles ids and mask; logprobs=fn
How: The last supervised token of a row, which no supervised position reads, gets another id. If the metric changes, a
second id shows whether it changes as -log π does.
Exceptions: A mask that is computed from the ids changes it too; the second id distinguishes the two.
Detects: an entropy bonus from the sampled tokens' log-probs, whose expected gradient is 0
"""

from __future__ import annotations

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.verdict import Finding

SMALL = 1e-5  # of the metric: sums of unchanged numbers in another order; one token among thousands is above it
ROOM = (0.02, 0.1)  # between the two ids' factors; in 16 bits the log-probs themselves are rounded


def terms(step: Step) -> list[str]:
    named = [m for m in step.terms if "entropy" in m.lower() and "cross" not in m.lower()]
    return named if step.kind == "policy gradient" else []


def check(probe: Probe) -> Rows:
    step, named, spot = probe.step, terms(probe.step), _last(probe)
    if spot is None:
        raise Ends(
            LAW.not_declared(f"term {named[0]} and the sampled tokens", 'roles={"ids": …, "mask": …}, side by side')
        )
    base, first = probe.look().metrics, _other(probe, spot, 1)
    there = probe.look(first).metrics
    for metric in (m for m in named if m in base and m in there):
        subject, change = f"term {metric} and the sampled tokens", there[metric] - base[metric]
        moved = f"another last token changed it by {change:.2g}"
        if not abs(change) > max(SMALL, 4 * probe.noise()) * max(abs(base[metric]), 1e-30):
            yield LAW.finding(subject, moved, "unchanged", True)
        elif step.logprobs is None:
            yield LAW.not_declared(subject, "logprobs=lambda model, batch: …")
        else:
            yield probe.fair(_judged(probe, metric, subject, moved, (first, _other(probe, spot, 2))))


def _judged(probe: Probe, metric: str, subject: str, moved: str, changed: tuple[edits.Batch, edits.Batch]) -> Finding:
    """It changes: as -log π of the sampled token does, for two other tokens, or otherwise (a mask made from ids)."""
    base = probe.look().metrics[metric]
    factors = []
    for batch in changed:
        gap = _negative_logprobs(probe, batch) - _negative_logprobs(probe, dict(probe.step.batch))
        factors.append((probe.look(batch).metrics[metric] - base) / gap if gap else 0.0)
    low, high = sorted(factors)
    if not (low > 0 and high - low <= ROOM[probe.coarse] * high):
        why = "It depends on the ids, but not as a log-prob does: a mask or a length may be computed from them."
        return LAW.not_applicable(subject, moved, why)
    return LAW.finding(
        subject, f"{moved}: {low:.2g} times the change of -log π", "unchanged", False,
        f"{metric} is the mean of -log π of the sampled tokens. Its value estimates the entropy, but its expected "
        "gradient is 0, so the bonus is noise. Use -Σ π log π over the vocabulary.",
    )  # fmt: skip


def _negative_logprobs(probe: Probe, batch: edits.Batch) -> float:
    """-Σ log π of the supervised tokens."""
    now = probe.forward(probe.step.logprobs, batch, graph=False)
    return -float((now * edits.taken(probe.step, now)).double().sum())


def _last(probe: Probe) -> Tensor | None:
    """The last supervised token of the first row that has any: nothing that is supervised comes after it."""
    on = edits.supervised_wide(probe.step)
    if on is None or not bool(on[:, 1:].any()):
        return None
    row = int(on[:, 1:].any(-1).nonzero()[0, 0])
    spot = torch.zeros_like(on)
    spot[row, int(on[row].nonzero()[-1])] = True
    return spot


def _other(probe: Probe, spot: Tensor, times: int) -> edits.Batch:
    """Another id there, and yet another; labels that name the same token go with it."""
    step = probe.step
    batch = dict(step.batch)
    for role in ("ids", "labels"):
        old = step.value(role)
        if old is not None and old.shape == spot.shape:
            for _ in range(times):
                old = edits.other_ids(step, old, spot)
            batch[step.roles[role]] = old
    return batch


LAW = Law("PG-ENTROPY", "entropy", __doc__, check, quick=False, tier="contrib", when=lambda step: bool(terms(step)))
