"""The parts of a loss, by its declarations: the loss with every declared term off and ``pure`` settings set, and each
term by itself, which is the loss with it less the loss without.

No declaration tells which part is the preference (or the divergence): DPO + α·CE keeps it when its term is off, in ORPO
it is the term λ, in α·KL + β·CE one of two. So of identical answers, or distributions, one part must have no gradient;
where only a part by another setting has none, that setting's kind is not declared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from earnest_audit.gradient import Gradient
from earnest_audit.probe import Probe

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


def parts(probe: Probe, *more: str) -> Iterator[Part]:
    """What is left with every declared term (and ``more``) off, then each term (or only ``more``) by itself."""
    step = probe.step
    quiet = {**step.terms_off, **step.pure, **dict.fromkeys(more, 0.0)}
    yield Part(quiet)
    for knob in more or [k for k in (*step.weights.values(), *step.switches) if k not in step.pure]:
        yield Part({**quiet, knob: SEPARATES * float(step.declared[knob].value or 1.0)}, quiet, knob)


@dataclass(frozen=True)
class RelativeGradient:
    """A part's gradient norm on a batch where it should be 0, relative to its usual norm."""

    part: Part
    usual: Gradient
    size: float

    def __str__(self) -> str:
        return f"gradient {self.size:.2g} of the usual" + (f" ({self.part.term} alone)" if self.part.term else "")


def relative(
    probe: Probe, usual: Mapping[str, Any], same: Mapping[str, Any], room: float, *more: str
) -> list[RelativeGradient]:
    """Of every part that has a gradient on ``usual``, up to one that has none on ``same``, which comes first."""
    found: list[RelativeGradient] = []
    for part in parts(probe, *more):
        try:
            present = part.gradient(probe, usual)
        except Exception:
            if part.less is None and not more:
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


def undeclared(probe: Probe, usual: Mapping[str, Any], same: Mapping[str, Any], room: float) -> str | None:
    """What is to be declared where a setting of no known kind weighs a term linearly, and the loss without that term,
    or the term by itself, has no gradient on ``same``."""
    step = probe.step
    unknown = {k for k, s in step.declared.items() if s.guessed or s.kind == "setting"}
    plain = unknown & step.numbers.keys() & step.knobs.keys() - step.guesses.keys() - step.pure.keys()
    for knob in sorted(k for k in plain if step.numbers[k] and probe.afford(8)):
        off, term = parts(probe, knob)
        with suppress(Exception):  # the step refuses such a weight, as it may
            twice = Part({**term.knobs, knob: 2 * term.knobs[knob]}, off.knobs).gradient(probe, usual)
            linear = twice.distance(term.gradient(probe, usual).times(2.0)) <= probe.tolerance
            if linear and (found := relative(probe, usual, same, room, knob)) and found[0].size <= room:
                return f'settings={{"{knob}": Setting({step.numbers[knob]:g}, "weight")}}, if it weighs another term,'
    return None
