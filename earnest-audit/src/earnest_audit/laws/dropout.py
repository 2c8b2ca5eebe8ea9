"""FD-DROPOUT: With dropout on and its masks fixed, the finite difference of the loss agrees with the gradient.

Every evaluation starts from one seed, so that all draw the same masks; a backward that runs a part of the forward again
has to draw them too.

Needs: a model with dropout; value_is_loss=True for policy gradients
How: Central differences along the gradient, every evaluation from the same seed. Measured again without dropout where
they disagree.
Exceptions: A step that also disagrees without dropout, or is random, is not judged here. Not in 16 bits, where 5 % is
rounding.
Detects: OLMo-core #828 (checkpointing that draws a new mask)
"""

from __future__ import annotations

from collections.abc import Iterator

from earnest_audit.law import Law
from earnest_audit.laws.finite_difference import is_integral, slopes
from earnest_audit.limits import NEAR
from earnest_audit.probe import Probe
from earnest_audit.restore import with_dropout
from earnest_audit.verdict import Finding

COST = 5 / 3  # a gradient and two looks
SUBJECT = "loss along its own gradient, dropout on"


def check(probe: Probe) -> Iterator[Finding]:
    step = probe.step
    with with_dropout(step.model) as rates:
        why = ""
        if not rates or not is_integral(step) or probe.coarse:
            coarse = "too coarse in this dtype" if probe.coarse else "the value is not the loss"
            why = coarse if rates else "no dropout"
        elif not probe.afford(COST, keep=0):
            why = "not checked: the budget is spent"
        if why:
            yield LAW.not_applicable(SUBJECT, why)
            return
        # A copy of the batch: readings of the declared one are kept, and have no dropout.
        batch = dict(step.batch)
        size, slope, _ = slopes(probe, batch, NEAR, probe.gradient(batch))
    if size == 0:
        yield LAW.not_applicable(SUBJECT, "no gradient, or none that is finite: see GL")
        return
    off = abs(slope - size) / size
    # A step with a detach by design (DoRA's norm) is off without dropout too, and about as much.
    if off > NEAR and (probe.random() or _off_without(probe) > off / 4):
        why = "Without dropout it is off as well, or the step is random: see FD."
        yield LAW.not_applicable(SUBJECT, "not a matter of dropout", why)
        return
    yield LAW.finding(
        SUBJECT, f"finite difference {slope:.4g}, gradient {size:.4g}", f"within {NEAR:.0%}", off <= NEAR,
        "With dropout on, and only then, the gradient is not that of the loss: activation checkpointing draws another "
        "mask when it runs the forward again (preserve_rng_state=False), or a hand-written backward does.",
    )  # fmt: skip


def _off_without(probe: Probe) -> float:
    batch = dict(probe.step.batch)
    size, slope, _ = slopes(probe, batch, NEAR, probe.gradient(batch))
    return abs(slope - size) / size if size > 0 else 0.0


LAW = Law("FD-DROPOUT", "dropout", __doc__, check, quick=False, tier="contrib")
