"""NLL: The least likely label becomes more likely.

cos(-∂L/∂z, ∂lp/∂z) > 0, z being the label's logits.   With the weight p undetached, ∇(-p·lp) = -(1 + lp)·p·∇lp
reverses below p = 1/e.

Needs: SFT with ids beside labels or a mask, and a model that gives logits for every token
How: L and lp are differentiated by the label's logits, which the model computes while the loss runs.
Exceptions: Regularisers rotate the gradient a little; only one that points away is a failure. Labels of a weight below
0 are left out; unlikelihood training without weights is not SFT.
Detects: a flipped sign of the loss, a DFT weight that is not detached
"""

from __future__ import annotations

import math

import torch

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.limits import AWAY, beside
from earnest_audit.logits import descent
from earnest_audit.probe import Probe
from earnest_audit.step import Step

SUBJECT = "the least likely label"


def imitates(step: Step) -> bool:
    held = "reference" in step.roles and not step.weights  # a penalty towards a reference alone is not imitation
    return step.kind == "sft" and not step.rows_interact and not held


def check(probe: Probe) -> Rows:
    step = probe.step
    if (found := descent(probe)) is None:
        raise Ends(LAW.not_applicable(SUBJECT, "no logits of the labels were found"))
    on = edits.fit(edits.supervised(step), found.logprobs)
    if on is not None and (weights := step.value("weights")) is not None:
        raised = (weights > 0).reshape(len(weights), -1)[:, -on.shape[1] :]
        on = on & raised if raised.shape[1] in (1, on.shape[1]) else None
    if on is None or on.shape != found.logprobs.shape or not bool(on.any()):
        raise Ends(LAW.not_applicable(SUBJECT, "log-probs do not fit the labels"))
    lowest = torch.where(on, found.logprobs, torch.inf).argmin()
    lp, cosine = float(found.logprobs.flatten()[lowest]), float(found.cosines.flatten()[lowest])
    LAW.needs(cosine and math.isfinite(cosine), SUBJECT, "it has a zero gradient: see CV")
    yield probe.descends(
        SUBJECT, f"cosine {beside(cosine, AWAY)} between -∂L and ∂lp by its logits, at lp = {lp:.2g}", cosine,
        "Training makes an unlikely label less likely: the loss has the wrong sign, or a weight that depends on the "
        "label's probability is not detached.", AWAY,
    )  # fmt: skip


LAW = Law("NLL", "likelihood", __doc__, check, quick=False, when=imitates, perturbed=True)
