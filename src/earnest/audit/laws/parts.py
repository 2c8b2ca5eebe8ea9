"""The part of a loss that a law is about, where other terms are in it too.

Every declared term is switched off, and ``pure`` settings are set; where nothing is left then (α·KL + β·CE with both
weights declared), or where the rest is not what is asked about (ORPO: the likelihood has weight 1, the preference λ),
each term is taken by itself: the loss with it less the loss without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from earnest.audit.gradient import Gradient
from earnest.audit.laws.clip_names import quiet_knobs
from earnest.audit.probe import Probe
from earnest.audit.step import Raises


@dataclass(frozen=True)
class Part:
    """The loss at ``knobs``, less the loss at ``less`` where that is given."""

    name: str
    knobs: Mapping[str, Any]
    less: Mapping[str, Any] | None = None

    def loss(self, probe: Probe, batch: Mapping[str, Any] | None) -> float:
        rest = 0.0 if self.less is None else probe.read(batch, self.less).loss
        return probe.read(batch, self.knobs).loss - rest

    def gradient(self, probe: Probe, batch: Mapping[str, Any] | None) -> Gradient:
        whole = probe.gradient(batch, self.knobs)
        return whole if self.less is None else whole.minus(probe.gradient(batch, self.less))

    def scale(self, probe: Probe, batch: Mapping[str, Any] | None) -> float:
        """What the part's gradient is exact to a fraction of: the longest vector that it is made of."""
        return max(
            probe.gradient(batch, self.knobs).norm(),
            0.0 if self.less is None else probe.gradient(batch, self.less).norm(),
        )


def parts(probe: Probe) -> Iterator[Part]:
    """What is left with every declared term off, then each term by itself."""
    step = probe.step
    quiet = {**quiet_knobs(step), **step.pure}
    yield Part("the loss" if not quiet else "the loss without its other terms", quiet)
    for metric, term in step.terms.items():
        knob = term.knob if isinstance(term, Raises) else term
        if knob not in step.pure:
            yield Part(f"term {metric}", {**quiet, knob: float(step.knobs[knob]) or 1.0}, quiet)


@dataclass(frozen=True)
class Pull:
    """How hard a part pulls on a batch where it should not, over how hard it usually does."""

    part: Part
    usual: Gradient
    size: float
    finite: bool


def weakest(probe: Probe, usual: Mapping[str, Any] | None, same: Mapping[str, Any], room: float) -> Pull | None:
    """The first part that has a gradient on ``usual`` and none on ``same``; else the first that has one at all."""
    first: Pull | None = None
    for part in parts(probe):
        present = part.gradient(probe, usual)
        if present.norm() <= probe.tolerance * (0.0 if part.less is None else part.scale(probe, usual)):
            continue  # nothing is left of the loss here
        there = part.gradient(probe, same)
        scale = present.norm() if part.less is None else max(present.norm(), part.scale(probe, same))
        pull = Pull(part, present, there.norm() / max(scale, 1e-300), there.finite())
        if pull.size <= room and pull.finite:
            return pull
        first = first or pull
    return first


def mixer(
    probe: Probe, part: Part, usual: Mapping[str, Any] | None, same: Mapping[str, Any], room: float
) -> tuple[str, float] | None:
    """The undeclared weight, and its end, that leave ``part`` without a pull on ``same``, if there is one.

    A weight enters the gradient on a straight line; a temperature or a mixture's share does not, so what is wrong at
    any other temperature than 1 is not explained away.
    """
    affine = min(max(probe.tolerance, 1e-3), 0.1)
    for knob, value in probe.step.knobs.items():
        if not isinstance(value, float) or knob in part.knobs:
            continue
        for end in (0.0, 1.0):
            if value == end:
                continue
            try:
                there = probe.gradient(same, {**part.knobs, knob: end})
                full = probe.gradient(usual, {**part.knobs, knob: end})
                half = probe.gradient(same, {**part.knobs, knob: (value + end) / 2})
            except Exception:
                continue  # the step refuses this value, as it may
            if not (there.finite() and full.finite() and full.norm() > 0 and there.norm() <= room * full.norm()):
                continue
            here = probe.gradient(same, part.knobs)
            if half.distance(here.plus(there).times(0.5)) <= affine:
                return knob, end
    return None
