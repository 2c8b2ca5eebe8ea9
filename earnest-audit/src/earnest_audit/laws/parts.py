"""The part of a loss that a law is about, where other terms are in it too.

Every declared term is switched off, and ``pure`` settings are set; where nothing is left then (α·KL + β·CE with both
weights declared), or where the rest is not what is asked about (ORPO: the likelihood has weight 1, the preference λ),
each term is taken by itself: the loss with it less the loss without. A weight whose term has no metric is one of them
where nothing else is left: the loss is then that one term.
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
    quiet = {**step.terms_off, **step.pure}
    yield Part("the loss" if not quiet else "the loss without its other terms", quiet)
    for metric, knob in step.weights.items():
        if knob not in step.pure:
            yield Part(f"term {metric}", {**quiet, knob: STRONG * (float(step.knobs[knob]) or 1.0)}, quiet)


def unnamed(probe: Probe) -> Iterator[Part]:
    """Each term that has a weight and no metric, by itself."""
    step = probe.step
    quiet = {**step.terms_off, **step.pure}
    for knob in step.switches:
        if knob not in step.pure:
            yield Part(f"the term of {knob}", {**quiet, knob: STRONG * (float(step.knobs[knob]) or 1.0)}, quiet)


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
    return _weakest(probe, parts(probe), usual, same, room) or _weakest(probe, unnamed(probe), usual, same, room)


def _weakest(
    probe: Probe, found: Iterator[Part], usual: Mapping[str, Any] | None, same: Mapping[str, Any], room: float
) -> RelativeGradient | None:
    first: RelativeGradient | None = None
    for part in found:
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


def mixer(
    probe: Probe, part: Part, usual: Mapping[str, Any] | None, same: Mapping[str, Any], room: float
) -> tuple[str, float] | None:
    """The undeclared weight, and its end, that leave ``part`` without a gradient on ``same``, if there is one.

    A weight enters the gradient on a straight line; a temperature or a mixture's share does not, so an error at
    a temperature other than 1 is not attributed to a weight.
    """
    affine, here = min(max(probe.tolerance, 1e-3), 0.1), probe.gradient(same, part.knobs)
    for knob, value in probe.step.knobs.items():
        if not isinstance(value, float) or knob in part.knobs:
            continue
        for end in (0.0, 1.0):
            if value == end:
                continue
            try:
                there = probe.gradient(same, {**part.knobs, knob: end})
                if not there.finite() or there.norm() > room * here.norm():
                    continue
                full = probe.gradient(usual, {**part.knobs, knob: end})
                half = probe.gradient(same, {**part.knobs, knob: (value + end) / 2})
            except Exception:
                continue  # the step refuses this value, as it may
            nothing = not full.finite() or there.norm() > room * full.norm()  # β = 0 leaves no loss at all
            if not nothing and half.distance(here.plus(there).times(0.5)) <= affine:
                return knob, end
    return None


def undeclared_weight(probe: Probe, part: Part, usual: Mapping[str, Any] | None, same: Mapping[str, Any]) -> str | None:
    """The setting whose own part of the gradient vanishes on ``same`` and not on ``usual``: ORPO's λ beside a
    likelihood of weight 1. (In a loss that has one term, everything is the setting's own part.)"""
    here, full = probe.gradient(same, part.knobs), probe.gradient(usual, part.knobs)
    for knob, value in probe.step.knobs.items():
        if not isinstance(value, float) or not value or knob in part.knobs:
            continue
        strong = {**part.knobs, knob: STRONG * value}
        try:
            there = probe.gradient(same, strong)
            if there.finite() and here.distance(there) <= probe.tolerance:
                away = probe.gradient(usual, strong)
                if away.finite() and full.distance(away) > 4 * probe.tolerance:
                    return knob
        except Exception:
            continue  # the step refuses this value, as it may
    return None
