"""MI-LENGTH: Unsupervised tokens after the answers do not change a row's weight.

In a causal model they cannot change log-probs; they can only change what a row is divided by.

Needs: roles ids, attention and mask or labels, or the same of either answer
How: Three attended columns are added at the end; the gradient keeps its direction.
Exceptions: Such tokens do matter to a model that is not causal, which is tested with other ids there.
Detects: answers that are divided by the length of prompt and answer, tool output in a row's normaliser
"""

from __future__ import annotations

import torch

from earnest_audit import edits
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.probe import Probe
from earnest_audit.step import Step

SUBJECT = "3 more tokens after the answers"
ATTENTIONS = ("attention", *(f"{s}_attention" for s in edits.SIDES))


def keys(step: Step, *roles: str) -> list[str]:
    return [step.roles[r] for r in roles if r in step.roles]


def declared(step: Step) -> bool:
    masked = edits.supervised(step) is not None or all(f"{s}_mask" in step.roles for s in edits.SIDES)
    return masked and not step.rows_interact and "documents" not in step.roles and bool(keys(step, *ATTENTIONS))


def check(probe: Probe) -> Rows:
    step = probe.step
    shown, texts, batch = keys(step, *ATTENTIONS), keys(step, "ids", *edits.SIDES), edits.pad(step)
    longer = [k for k in (*shown, *texts) if batch[k].shape[1] == step.batch[k].shape[1] + 3]
    if len(longer) < len(shown) + len(texts) or not texts:
        return
    for key in shown:
        batch[key] = torch.cat([batch[key][:, :-3], torch.ones_like(batch[key][:, -3:])], dim=1)
    other = dict(batch)
    for key in texts:
        new = torch.zeros_like(batch[key], dtype=torch.bool)
        new[:, -3:] = True
        other[key] = edits.other_ids(step, batch[key], new)
    with probe.may_refuse(SUBJECT):
        here, there = probe.gradient(), probe.gradient(batch)
    rest = there.distance(here.times(there.best_scale(here)))
    if rest > probe.tolerance and (
        not there.finite() or there.distance(probe.gradient(other)) > probe.tolerance or probe.random()
    ):
        raise Ends(LAW.not_applicable(SUBJECT, "the model attends to later tokens"))
    yield probe.same(
        SUBJECT, rest,
        "Unsupervised tokens after the answers change the weight of rows: a row is divided by its whole length, "
        "prompt or tool output included, and not by its number of supervised tokens.",
        what="the same up to a factor and {}",
    )  # fmt: skip


LAW = Law("MI-LENGTH", "row length", __doc__, check, quick=False, tier="contrib", when=declared, spare=2)
