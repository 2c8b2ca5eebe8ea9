"""FD: The finite difference of the reported loss agrees with the gradient, with dropout too.

(L(θ + εd) - L(θ - εd)) / 2ε  =  ⟨∇L, d⟩

Needs: value_is_loss=True for policy gradients and self-distillation; SFT, divergences from a role teacher and
preferences are taken to be so
How: Central differences along the gradient, from a perturbed, off-policy state, in a float64 copy of the model where
one can be run, at several step lengths; the best one counts (a clip has corners). Then each term whose weight is
declared, at a thousand times its weight; then with dropout on, where one seed draws the same masks each time.
Exceptions: Fails by design for stop-gradient objectives (REINFORCE surrogates, CISPO, DFT, WPO), for adapters with a
detached factor (DoRA's norm) and for straight-through gradients: they declare value_is_loss=False. So may a loss over
the student's own top k, which jumps. A loss that casts to 16 bits on the way fails; where its modules do (autocast), it
is "not declared". A step that is random, or off without dropout too, is not judged with it.
Detects: SkyRL #1353, TRL #4499, hand-written backwards that are right only for uniform upstream gradients, code that
rounds on the way, OLMo-core #828 (checkpointing that draws a new dropout mask)
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from earnest_audit import edits
from earnest_audit.gradient import Gradient
from earnest_audit.law import Ends, Law, Rows
from earnest_audit.limits import NEAR, STRONG
from earnest_audit.probe import Probe
from earnest_audit.restore import with_dropout
from earnest_audit.verdict import Finding

# Lengths of a step, of the parameters' norm: a clip has corners and a sum has rounding. In float64 only short ones: one
# step of 16 bits is longer.
LENGTHS, EXACT = (1e-3, 1e-2, 1e-4, 3e-5, 1e-5), (1e-4, 1e-5, 1e-6)
FLOAT32 = torch.finfo(torch.float32).eps
ALONG, DROPOUT = "loss along its own gradient", "loss along its own gradient, dropout on"
SPENT = "not checked: the budget is spent"
MEANING = (
    "The value that is reported is not what the gradient descends: a part of it has no gradient (no_grad, detach), a "
    "backward is wrong, the code rounds on the way (a cast to 16 bits), or one of them is scaled. Where a factor is "
    "detached by design (DFT, WPO), declare value_is_loss=False."
)


def check(probe: Probe) -> Rows:
    step = probe.step
    LAW.needs(step.value_is_loss is not False, step.name, "stop-gradients by declaration")
    # A divergence whose teacher is no input has it made in the step, under a detach as a rule.
    given = step.kind in ("preference", "sft") or (step.kind == "divergence" and "teacher" in step.roles)
    if not (given or step.value_is_loss):
        what = "value_is_loss=True (ratio forms, SFT, DPO, a given teacher) or False (a detach by design: REINFORCE),"
        raise Ends(LAW.not_declared(step.name, what))
    with probe.perturbed():
        exact = _exact(probe)
        if exact is None and probe.coarse:
            what = "a copy of the model in fp32: in 16 bits a short step is rounded away,"
            raise Ends(LAW.not_declared(step.name, what))
        measured, before = exact or probe, 0.0 if exact is None else probe.cost
        batch = measured.off_policy()
        yield _judged(ALONG, slopes(measured, batch, measured.gradient(batch)))
        metrics = {knob: metric for metric, knob in step.weights.items()}
        for knob in step.terms_off:
            probe.cost = before + measured.cost
            subject = f"term {metrics.get(knob, knob)} along its own gradient"
            with suppress(Exception):  # the step may refuse such a weight
                found = _term(measured, batch, knob) if probe.afford(10 / 3, keep=3) else None
                yield LAW.not_applicable(subject, SPENT) if found is None else _judged(subject, found)
        probe.cost = before + measured.cost
    if not probe.coarse:
        yield from _with_dropout(probe)


def float64_copy(probe: Probe) -> Probe:
    """The same step on a float64 copy of its model as it is now, with the off-policy batch; made once in this state."""

    def make() -> Probe:
        twin = probe.twin()
        twin.kept("off-policy", lambda: edits.lifted(probe.off_policy()))
        return twin

    return probe.kept("a float64 copy", make)


def _exact(probe: Probe) -> Probe | None:
    """The float64 copy; None where it cannot be run, where the loss does not use the model that it is given, or casts
    to 16 bits itself."""
    fine = all(p.dtype.itemsize >= 4 for p in probe.step.model.parameters())
    if probe.step.precision is not None or (fine and probe.coarse):
        return None
    with suppress(Exception):
        twin = float64_copy(probe)
        if twin.gradient(twin.off_policy()).norm() > 0 and (fine or not twin.coarse):
            return twin
    return None


def _term(probe: Probe, batch: edits.Batch, knob: str) -> tuple[float, float]:
    """The loss with the term a thousand times as heavy, along the term's own gradient."""
    weight = float(probe.step.knobs[knob])
    rest = probe.gradient(batch, {knob: 0.0})
    own = probe.gradient(batch, None if weight else {knob: 1.0}).minus(rest)
    return slopes(probe, batch, own, rest.plus(own, STRONG), {knob: STRONG * (weight or 1.0)})


def _with_dropout(probe: Probe) -> Rows:
    """A backward that runs a part of the forward again has to draw the same masks."""
    batch = dict(probe.step.batch)  # a copy: readings of the declared one are kept, and have no dropout
    if not probe.dropout:
        return
    with with_dropout(probe.dropout):
        LAW.needs(probe.afford(5 / 3, keep=0), DROPOUT, SPENT)  # a gradient and two looks
        found = slopes(probe, batch, probe.gradient(batch))
    if (off := _off(found)) > NEAR:
        # A step with a detach by design (DoRA's norm) is off without dropout too, and about as much.
        without = _off(slopes(probe, batch, probe.gradient(batch)))
        own = not probe.random and without <= off / 4
        LAW.needs(own, DROPOUT, "not a matter of dropout", "It is off without, or the step is random.")
    yield _judged(
        DROPOUT, found,
        "With dropout on, and only then, the gradient is not the loss's: activation checkpointing draws another mask "
        "when it runs the forward again (preserve_rng_state=False), or a hand-written backward does.",
    )  # fmt: skip


def _off(found: tuple[float, float]) -> float:
    size, slope = found
    return abs(slope - size) / size if size else 0.0


def _judged(subject: str, found: tuple[float, float], meaning: str = MEANING) -> Finding:
    """The row of one finite difference: the slope by the gradient, and the difference."""
    size, slope = found
    if size == 0:
        return LAW.not_applicable(subject, "no gradient, or none that is finite: see GL")
    measured = f"finite difference {slope:.4g}, gradient {size:.4g}"
    return LAW.finding(subject, measured, f"within {NEAR:.0%}", abs(slope - size) <= NEAR * abs(size), meaning)


def slopes(
    probe: Probe, batch: Mapping[str, Any], along: Gradient, gradient: Gradient | None = None,
    knobs: Mapping[str, Any] | None = None,
) -> tuple[float, float]:  # fmt: skip
    """The slope along a direction by the gradient (by default: the direction; 0 where there is none that is finite),
    and the nearest finite difference. A float64 copy may have a norm that computes in fp32: its losses are taken to be
    exact to a unit of fp32."""
    if along.norm() == 0 or not along.finite():
        return 0.0, 0.0
    size = along.norm() if gradient is None else gradient.dot(along) / along.norm()
    found: list[float] = []
    lengths = EXACT if all(p.dtype == torch.float64 for p in probe.parameters.values()) else LENGTHS
    for length in lengths:
        reach, values = probe.reach(length), []
        for sign in (+1, -1):
            with probe.along(along, sign * reach):
                values.append(probe.look(dict(batch), knobs).loss)
        slope, grain = (values[0] - values[1]) / (2 * reach), FLOAT32 * max(map(abs, values)) / reach
        grain = grain if length == EXACT[0] and lengths is EXACT else 0.0  # at shorter ones it hides the slope
        found.append(size if abs(slope - size) <= grain else slope)
        if abs(found[-1] - size) <= NEAR * abs(size):
            break
    return size, min(found, key=lambda slope: abs(slope - size))


LAW = Law("FD", "finite difference", __doc__, check, quick=False, spare=5 / 3)
