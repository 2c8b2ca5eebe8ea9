"""Adapters: at their initialization, and merged into their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit.precision import rounding
from earnest_audit.restore import moved, perturbed
from earnest_audit.subjects.base import Subject, gap, largest, outputs
from earnest_audit.verdict import Finding

NUDGE = 2.0**-12


@dataclass
class AdapterStart(Subject, name="adapter at initialization"):
    """ADAPTER: A fresh adapter changes nothing where it claims so, leaves the base alone, and can be switched off.

    outputs(attach(model)) = outputs(model);  base weights keep their bits;  after training, disabled = the base

    Needs: ``attach(model)`` adapts the model in place or returns another; ``outputs(model)`` are logits of a fixed
    text. ``disable(model)`` is a context manager inside which the adapter is off.
    How: Outputs before and after attaching; then the trainable parameters are perturbed and the adapter is disabled.
    Exceptions: An adapter that changes the outputs at initialization by design declares identity=False.
    Warns: (row "base weights", where their change is made up for) PiSSA takes the adapter's start out of the base.
    Detects: an initialization that is not exact, attaching that rounds or replaces base weights, a disable_adapter()
    that leaves a bias or a scale behind, an adapter that trains nothing
    """

    model: nn.Module
    attach: Callable[[nn.Module], nn.Module | None]
    outputs: Callable[[nn.Module], Tensor]
    disable: Callable[[nn.Module], AbstractContextManager[Any]] | None = None
    identity: bool = True

    def check(self) -> Iterator[Finding]:
        before = outputs(self.outputs, self.model)
        base = {id(p): (name, p, p.detach().clone()) for name, p in self.model.named_parameters()}
        adapted = self.attach(self.model) or self.model
        fresh = self.not_applicable("at initialization", "it changes the outputs by declaration")
        if self.identity:
            why = "The adapter changes the model before any training: its initialization is not the identity."
            fresh = self.same("at initialization", before, outputs(self.outputs, adapted), why)
        yield fresh
        trained = [p for p in adapted.parameters() if p.requires_grad]
        own = [p for p in trained if id(p) not in base]
        names = f"{len(own)} of {len(trained)} trainable parameters are the adapter's"
        why = "Nothing of the adapter is trainable, or base weights are trained with it."
        yield self.finding("what is trainable", names, "all, and some", bool(own) and len(own) == len(trained), why)
        with perturbed(own, 1.0):
            why = "Perturbing every parameter of the adapter does not change the outputs: it is not applied."
            yield self.moved("perturbed", outputs(self.outputs, adapted), before, why)
            if self.disable is None:
                yield self.not_declared("disabled", "disable=lambda model: …, a context manager,")
            else:
                with self.disable(adapted):
                    found = outputs(self.outputs, adapted)
                why = "With the adapter disabled the model is not the base: a bias, a scale or a merged weight is left."
                yield self.same("disabled", before, found, why)
        changed = {name: (p, old) for name, p, old in base.values() if not torch.equal(p.detach(), old)}
        row = self.none("base weights", list(changed), f"{len(changed)} changed", " changed by attaching the adapter.")
        if changed and fresh.outcome == "holds":
            olds = iter(old for _, old in changed.values())
            with moved([p for p, _ in changed.values()], lambda p, _: next(olds) - p, seed=0):
                without = self.same("", before, outputs(self.outputs, adapted), "")
            row = self.law.doubtful(row) if without.outcome == "fails" else row  # the adapter makes up for the change
        yield row


@dataclass
class Merge(Subject, name="merge"):
    """MERGE: merge(-w) = -merge(w), merge(½) = ½·merge(1), a repeated merge(1) is the same, and merged = unmerged.

    Needs: ``delta(w)`` is what merging an adapter with weight w adds to the base; ``applied(w)`` is the unmerged
    effect, where it is known. ``linear=False`` where the weight does not act linearly by design (DoRA divides by a
    norm). ``once=True`` where the adapter can be merged a single time: then only merged = unmerged is checked.
    How: Differences of the merged weights. The tolerance is their dtype's rounding, or 16 times what a weight of 1 ±
    2⁻¹² misses by, where a small difference is written into large weights.
    Exceptions: A difference of bf16 weights is coarse; the tolerance shows it. DoRA is not linear in its weight.
    Detects: a square root or an absolute value of the weight, another scale in the merged path
    """

    delta: Callable[[float], Tensor]
    applied: Callable[[float], Tensor] | None = None
    linear: bool = True
    once: bool = False

    def check(self) -> Iterator[Finding]:
        applied = None if self.applied is None else self.applied(1.0).detach().clone()
        one = self.delta(1.0).detach().clone()
        size = max(largest(one.abs()), 1e-12)
        room = self._room(one, size)
        changes = bool((one != 0).any())
        yield self.finding("merge(1)", f"changes weights by {size:.2g}", "above 0", changes, "Merging adds nothing.")
        rows: list[tuple[str, Tensor, str]] = []
        if self.once:
            yield self.not_applicable("merge(1) again", "it can be merged once, by declaration")
        else:
            own = "(Adapters that are not linear in their weight, such as DoRA, declare linear=False.)"
            if self.linear:
                why = f"A negative weight does not merge the opposite: a root or an absolute value of it. {own}"
                rows.append(("merge(-w) = -merge(w)", -self.delta(-1.0), why))
                why = f"The weight does not scale the merged difference linearly. {own}"
                rows.append(("merge(½) = ½·merge(1)", self.delta(0.5) * 2, why))
            why = "A second merge adds something else: the base or the adapter was written into by the last merge."
            rows.append(("merge(1) again", self.delta(1.0), why))
        if applied is not None:
            rows.append(("merged = unmerged", applied, "The merged model differs from the adapter beside its layer."))
        for subject, found, meaning in rows:
            yield self.agrees(subject, largest(gap(found, one)) / size, room, meaning)

    def _room(self, one: Tensor, size: float) -> float:
        """A difference of large weights is as fine as those are, which is what a weight of 1 ± 2⁻¹² (or four units in
        the last place, where they are more) misses by. A smooth curve misses next to nothing of the middle."""
        if self.once:
            return rounding(one)
        nudge = max(NUDGE, 4 * torch.finfo(one.dtype).eps)
        above, below = self.delta(1 + nudge), self.delta(1 - nudge)
        apart = [above - (1 + nudge) * one, below - (1 - nudge) * one]
        missed = apart if self.linear else [above + below - 2 * one]
        return min(0.5, max(16 * max(largest(m.abs()) for m in missed) / size, rounding(one)))


@dataclass
class MergedLayer(Subject, name="merged layer"):
    """DF-MERGED: Merging once, merging twice and unmerging do not change the layer's output.

    Needs: ``outputs()`` is the output of the layer or model, adapter included; ``merge()`` writes the adapter into the
    weights and ``unmerge()`` takes it out again. ``model`` is the module whose dropout is turned off for outputs.
    How: Outputs before and after each call. The tolerance is rounding in their dtype, relative to the largest.
    Exceptions: A layer may refuse a second merge.
    Detects: candle-lora #26 (a merged layer adds its adapter again)
    """

    outputs: Callable[[], Tensor]
    merge: Callable[[], Any]
    unmerge: Callable[[], Any] | None = None
    tolerance: float | None = None
    model: nn.Module | None = None

    def check(self) -> Iterator[Finding]:
        before = outputs(self.outputs, model=self.model)
        for act, subject, meaning in (
            (self.merge, "merged", "The merged layer still adds its adapter, or it merges with another scale."),
            (self.merge, "merged twice", "A second merge adds the adapter again: nothing records the first one."),
            (self.unmerge, "unmerged", "Unmerging does not cancel merging: a scale, a cast, or a flag that stays."),
        ):
            if act is None:
                yield self.not_applicable("outputs, unmerged", "not checked", "Declare unmerge=… and it is checked.")
                return
            try:
                act()
            except Exception as error:
                if subject != "merged twice":
                    raise
                subject += f" (refused: {type(error).__name__})"  # as good as doing nothing
            after = outputs(self.outputs, model=self.model)
            yield self.same(f"outputs, {subject}", before, after, meaning, self.tolerance)
