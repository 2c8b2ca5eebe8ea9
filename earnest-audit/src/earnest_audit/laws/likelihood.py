"""NLL: The least likely label, alone in the loss, becomes more likely.

cos(-∇L, ∇lp) > 0.   With the weight p undetached, ∇(-p·lp) = -(1 + lp)·p·∇lp reverses below p = 1/e.

Needs: SFT with labels or a mask, and logprobs=fn(model, batch)
How: All labels but one are masked; the loss's gradient is compared with that of the label's log-prob.
Exceptions: Regularisers and other mask conventions rotate the gradient a little; only a gradient that points away is a
failure. Unlikelihood training is not SFT.
Detects: a DFT weight that is not detached
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from earnest_audit import edits
from earnest_audit.law import Law
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.verdict import Finding

AWAY = -0.5  # a mask that marks the predicting place leaves a cosine of about 0, a regulariser one above
SUBJECT = "the least likely label"


def imitates(step: Step) -> bool:
    held = "reference" in step.roles and not step.terms  # a penalty towards a reference alone is not imitation
    return step.kind == "sft" and step.logprobs is not None and not step.rows_interact and not held


def check(probe: Probe) -> Iterator[Finding]:
    step, now = probe.step, probe.forward(probe.step.logprobs)
    on = edits.fit(edits.supervised(step), now)
    if on is None or on.shape != now.shape or not bool(on.any()):
        yield LAW.not_applicable(SUBJECT, "log-probs do not fit the labels")
        return
    lowest = torch.where(on, now.detach(), torch.full_like(now, torch.inf)).argmin()
    row, column = divmod(int(lowest), now.shape[1])
    up, down = probe.pull(now[row, column]), probe.gradient(_alone(probe, row, column - now.shape[1]), step.terms_off)
    if down.norm() * up.norm() == 0 or not down.finite():
        yield LAW.not_applicable(SUBJECT, "alone it has a zero gradient: see CV")
        return
    cosine, lp = -down.cosine(up), float(now[row, column].detach())
    yield probe.descends(
        SUBJECT, f"alone: cosine {cosine:+.2f} between -∇L and ∇lp, at lp = {lp:.2g}", cosine,
        "Training makes an unlikely label even less likely: a weight that depends on its probability is not detached, "
        "or a sign is lost.", AWAY,
    )  # fmt: skip


def _alone(probe: Probe, row: int, column: int) -> edits.Batch:
    """The batch with one supervised place; ``column`` counts from the end, where labels and log-probs agree."""
    batch = dict(probe.step.batch)
    for role, off in (("labels", -100), ("mask", 0)):
        value = probe.step.value(role)
        if value is not None:
            only = torch.full_like(value, off)
            only[row, column] = value[row, column]
            batch[probe.step.roles[role]] = only
    return batch


LAW = Law.of("NLL", "likelihood", __doc__, check, quick=False, tier="contrib", when=imitates, perturbed=True)
