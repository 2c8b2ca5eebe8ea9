"""The part of a loss that a law is about, where other terms are in it too.

Every declared term is switched off, and ``pure`` settings are set; where nothing is left then (α·KL + β·CE with both
weights declared), or where the rest is not what is asked about (ORPO: the likelihood has weight 1, the preference λ),
each term is taken by itself: the loss with it less the loss without. Those whose weight has no metric come last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from earnest_audit.gradient import Gradient
from earnest_audit.probe import Probe

STRONG = 100.0  # times its weight a term exceeds what it is subtracted from, in bf16 too; KG checks that it is a weight


@dataclass(frozen=True)
class Part:
    """The loss at ``knobs``, less the loss at ``less`` where that is given. ``term``: the weight that differs."""

    knobs: Mapping[str, Any]
    less: Mapping[str, Any] | None = None
    term: str = ""

    def loss(self, probe: Probe, batch: Mapping[str, Any] | None) -> float:
        rest = 0.0 if self.less is None else probe.read(batch, self.less).loss
        return probe.read(batch, self.knobs).loss - rest

    def gradient(self, probe: Probe, batch: Mapping[str, Any] | None) -> Gradient:
        whole = probe.gradient(batch, self.knobs)
        return whole if self.less is None else whole.minus(probe.gradient(batch, self.less))

    def scale(self, probe: Probe, batch: Mapping[str, Any] | None) -> float:
        """What the part's gradient is exact to a fraction of: the longest vector that it is made of."""
        rest = 0.0 if self.less is None else probe.gradient(batch, self.less).norm()
        return max(probe.gradient(batch, self.knobs).norm(), rest)


def parts(probe: Probe) -> Iterator[Part]:
    """What is left with every declared term off, then each term by itself."""
    quiet = {**probe.step.terms_off, **probe.step.pure}
    yield Part(quiet)
    for knob in (k for k in (*probe.step.weights.values(), *probe.step.switches) if k not in probe.step.pure):
        yield Part({**quiet, knob: STRONG * (float(probe.step.knobs[knob]) or 1.0)}, quiet, knob)


@dataclass(frozen=True)
class RelativeGradient:
    """A part's gradient norm on a batch where it should be 0, relative to its usual norm."""

    part: Part
    usual: Gradient
    size: float
    finite: bool


def weakest(
    probe: Probe, usual: Mapping[str, Any] | None, same: Mapping[str, Any], room: float
) -> RelativeGradient | None:
    """The first part that has a gradient on ``usual`` and none on ``same``; else the first that has one at all."""
    first: RelativeGradient | None = None
    for part in parts(probe):
        try:
            present = part.gradient(probe, usual)
        except Exception:
            if part.less is None:
                raise
            continue  # the step refuses such a weight, as it may
        if present.norm() <= probe.tolerance * (0.0 if part.less is None else part.scale(probe, usual)):
            continue  # nothing is left of the loss here
        there = part.gradient(probe, same)
        scale = present.norm() if part.less is None else max(present.norm(), part.scale(probe, same))
        pull = RelativeGradient(part, present, there.norm() / max(scale, 1e-300), there.finite())
        if pull.size <= room and pull.finite:
            return pull
        first = first or pull
    return first
