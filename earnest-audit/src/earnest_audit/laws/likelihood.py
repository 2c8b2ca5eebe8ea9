"""NLL: The least likely label becomes more likely.

cos(-∇L, ∇lp) > 0.   With the weight p undetached, ∇(-p·lp) = -(1 + lp)·p·∇lp reverses below p = 1/e.

Needs: SFT with labels or a mask; logprobs=fn(model, batch), or ids and a model that gives logits for every token
How: With logprobs, all labels but one are masked, and the loss's gradient is compared with that of the label's
log-prob. Without, both are differentiated by the label's logits, which the model computes while the loss runs.
Exceptions: Regularisers and other mask conventions rotate the gradient a little; only a gradient that points away is a
failure. Labels of a weight below 0 are left out; unlikelihood training without weights is not SFT.
Detects: a flipped sign of the loss, a DFT weight that is not detached
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.law import Law
from earnest_audit.limits import AWAY, beside
from earnest_audit.logits import descent
from earnest_audit.probe import Probe
from earnest_audit.step import Step
from earnest_audit.verdict import Finding

SUBJECT = "the least likely label"


def imitates(step: Step) -> bool:
    held = "reference" in step.roles and not step.terms  # a penalty towards a reference alone is not imitation
    return step.kind == "sft" and not step.rows_interact and not held


def check(probe: Probe) -> Iterator[Finding]:
    step, found = probe.step, descent(probe) if probe.step.logprobs is None else None
    if step.logprobs is None and found is None:
        yield LAW.not_declared(SUBJECT, "logprobs=lambda model, batch: …")
        return
    now = probe.forward(step.logprobs) if found is None else found.logprobs
    on = edits.fit(edits.supervised(step), now)
    if on is not None and (weights := step.value("weights")) is not None:
        raised = (weights > 0).reshape(len(weights), -1)[:, -now.shape[1] :]
        on = on & raised if raised.shape[1] in (1, now.shape[1]) else None
    if on is None or on.shape != now.shape or not bool(on.any()):
        yield LAW.not_applicable(SUBJECT, "log-probs do not fit the labels")
        return
    lowest = torch.where(on, now.detach(), torch.full_like(now, torch.inf)).argmin()
    row, column = divmod(int(lowest), now.shape[1])
    cosine = _alone(probe, now, row, column) if found is None else float(found.cosines[row, column])
    if not cosine or not math.isfinite(cosine):
        yield LAW.not_applicable(SUBJECT, "alone it has a zero gradient: see CV")
        return
    lp, where = float(now[row, column].detach()), "alone" if found is None else "in its logits"
    yield probe.descends(
        SUBJECT, f"{where}: cosine {beside(cosine, AWAY)} between -∇L and ∇lp, at lp = {lp:.2g}", cosine,
        "Training makes an unlikely label even less likely: the sign of the loss is flipped, or a weight that depends "
        "on the label's probability is not detached.", AWAY,
    )  # fmt: skip


def _alone(probe: Probe, now: Tensor, row: int, column: int) -> float | None:
    """cos(-∇L, ∇lp) of one label, the only supervised one. Labels and log-probs agree from the end."""
    keep = torch.zeros(len(now), now.shape[1] + 1, dtype=torch.bool, device=now.device)
    keep[row, column - now.shape[1]] = True
    up = probe.pull(now[row, column])
    down = probe.gradient(edits.only(probe.step, probe.step.batch, keep), probe.step.terms_off)
    return -down.cosine(up) if down.norm() * up.norm() > 0 and down.finite() else None


LAW = Law("NLL", "likelihood", __doc__, check, quick=False, tier="contrib", when=imitates, perturbed=True)
