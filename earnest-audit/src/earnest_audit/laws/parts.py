"""The parts of a loss, by its declarations: the loss with every declared term off and ``pure`` settings set, and each
term by itself, which is the loss with it less the loss without.

A declaration says what weighs a term, and not which part is the preference (or the divergence): DPO + α·CE keeps it
when its term is off, in ORPO it is the term λ, in α·KL + β·CE one of two. So the laws of identical answers and
identical distributions require that one of the declared parts has no gradient there; where only a part by another
setting has none, that setting's kind is not declared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from earnest_audit.gradient import Gradient
from earnest_audit.probe import Probe
from earnest_audit.step import Step

SEPARATES = 100.0  # times its weight a term exceeds what it is subtracted from, in bf16 too; KG checks its kind


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


def quiet(step: Step) -> dict[str, Any]:
    """Every declared term off, and ``pure`` settings at their value."""
    return {**step.terms_off, **step.pure}


def parts(probe: Probe) -> Iterator[Part]:
    """What is left with every declared term off, then each term by itself."""
    off = quiet(probe.step)
    yield Part(off)
    for knob in (k for k in (*probe.step.weights.values(), *probe.step.switches) if k not in probe.step.pure):
        yield Part({**off, knob: SEPARATES * float(probe.step.declared[knob].value or 1.0)}, off, knob)


@dataclass(frozen=True)
class RelativeGradient:
    """A part's gradient norm on a batch where it should be 0, relative to its usual norm."""

    part: Part
    usual: Gradient
    size: float

    def __str__(self) -> str:
        return f"gradient {self.size:.2g} of the usual" + (f" ({self.part.term} alone)" if self.part.term else "")


def relative(
    probe: Probe, usual: Mapping[str, Any] | None, same: Mapping[str, Any], room: float, of: Iterable[Part] = ()
) -> list[RelativeGradient]:
    """Of every part that has a gradient on ``usual``, up to one that has none on ``same``, which comes first."""
    found: list[RelativeGradient] = []
    for part in of or parts(probe):
        try:
            present = part.gradient(probe, usual)
        except Exception:
            if part.less is None and not of:
                raise
            continue  # the step refuses such a weight, as it may
        if present.norm() <= probe.tolerance * (0.0 if part.less is None else part.scale(probe, usual)):
            continue  # nothing is left of the loss here
        there = part.gradient(probe, same)
        scale = present.norm() if part.less is None else max(present.norm(), part.scale(probe, same))
        pull = RelativeGradient(part, present, there.norm() / max(scale, 1e-300) if there.finite() else math.inf)
        if pull.size <= room:
            return [pull, *found]
        found.append(pull)
    return found


def undeclared(probe: Probe, usual: Mapping[str, Any] | None, same: Mapping[str, Any], room: float) -> str | None:
    """What is to be declared where a setting of no known kind weighs a term linearly, and the loss without that term,
    or the term by itself, has no gradient on ``same``."""
    step, off = probe.step, quiet(probe.step)
    for knob, value in step.numbers.items():
        known = knob in off or knob in step.guesses or step.declared[knob].kind != "setting"
        if known or knob not in step.knobs or not value or not probe.afford(8):
            continue
        with suppress(Exception):  # the step refuses such a weight, as it may
            none, here, twice = (probe.gradient(usual, {**off, knob: SEPARATES * value * n}) for n in (0.0, 1.0, 2.0))
            if here.minus(none).distance(twice.minus(here)) > probe.tolerance:
                continue
            split = Part({**off, knob: 0.0}), Part({**off, knob: SEPARATES * value}, {**off, knob: 0.0}, knob)
            if (found := relative(probe, usual, same, room, split)) and found[0].size <= room:
                return f'settings={{"{knob}": Setting({value:g}, "weight")}}, if {knob} weighs another term,'
    return None
