"""What reaches the optimizer: the gradient of many micro-batches or ranks, clipped, and nothing of the last update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from earnest_audit.edits import rows_of
from earnest_audit.gradient import Gradient
from earnest_audit.measure import fresh, result_of
from earnest_audit.precision import COARSE, coarsest, noticing
from earnest_audit.restore import calling, empty_grads, moved, restored, without_dropout
from earnest_audit.subjects.base import Subject
from earnest_audit.verdict import Finding

WHOLE = "the whole batch's gradient"
SAME = 16  # units in the last place: two calls that did the same; as many times that, and they did not
LEFT = 0.25  # in 16 bits a multiple of the unit would let anything pass
PARTS = (
    "Cut into uneven parts, the batch gives another gradient: a mean of means, a division that is missing or done "
    "twice, or gradients cleared between parts. A loss per micro-batch by design declares rows_interact=True."
)
COPIES = "The same batch twice has another direction: a term is multiplied by the number of parts, the others are not."
IDLE = "A part without a gradient spoils the other: 0 / 0, or a dropped update. Where none occurs, give split=…. "
CUTS = 8  # how many cuts are tried for one whose parts both train
TWICE = 0.25  # two gradients that are added are off by about a half: the room has to stay below
BINDS = 0.05  # of the gradient's norm: below that of a part, whose own clip would bind too
STABILISER = 1e-6  # what torch's clip_grad_norm_ adds to the norm before it divides
ANOTHER = "The optimizer gets another gradient: a mean of means, a scale that stays, only the last part, an early clip."
CLIPPED = "It is clipped per micro-batch, before the loss scale is taken off, by a norm that counts a part twice or "
CLIPPED += "leaves one out, or never."
LAST = "The next update is given something of the last one: gradients are not cleared (zero_grad) between two updates."


class _Gradients(Subject, name=""):
    """What the two subjects have in common: gradients of ``model``, and by how much equal ones may differ."""

    model: nn.Module
    batch: Mapping[str, Any]
    split: Sequence[int] | None
    seed: int
    precision: torch.dtype | None

    def check(self) -> Iterator[Finding]:
        if self._trained():
            with without_dropout(self.model):  # other parts would get other masks
                yield from list(self._check())
        else:
            why = "No parameter requires a gradient."
            yield self.finding(WHOLE, "no parameter is trainable", "finite and above 0", False, why)

    def _check(self) -> Iterator[Finding]:
        """The rows, where there is something to train."""
        raise NotImplementedError  # abstract: both define it

    def _has(self, whole: Gradient, why: str) -> Finding:
        norm = whole.norm()
        return self.finding(WHOLE, f"norm {norm:.3g}", "finite and above 0", 0 < norm < math.inf, why)

    def _row(self, subject: str, found: Gradient | None, wanted: Gradient, room: float, meaning: str) -> Finding:
        if found is None:
            once = "One update must step the optimizer once; it steps once per micro-batch, or not at all."
            return self.finding(subject, "not one call of optimizer.step()", "one call per update", False, once)
        factor, why = found.best_scale(wanted), _most(found, wanted) + meaning
        few, every = len(wanted.parts), len(self._trained())
        some = f", {few} of {every} trainable parameters" if few < every else ""
        return self.agrees(subject, wanted.distance(found), room, why, f"off by {{}} (best factor {factor:.3g}){some}")

    def _made_by(self, act: Callable[[], Any]) -> Gradient:
        """What ``act`` leaves in ``.grad``, which is empty before; the model, with its buffers, is restored."""
        with restored(self.model, None), empty_grads(self.model.parameters()), calling(self.seed, graph=True):
            act()
            return self._left(self._trained())

    def _left(self, named: Mapping[str, Tensor]) -> Gradient:
        """A copy of what stands in ``.grad``."""
        return Gradient({n: None if p.grad is None else p.grad.detach().clone() for n, p in named.items()})

    def _trained(self) -> dict[str, Tensor]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def _cuts(self, gradient: Callable[[Mapping[str, Any]], Gradient]) -> list[tuple[list[int], list[Any], str]]:
        """Uneven cuts of the batch: the numbers of rows, the parts, and the first words on a failure. By default two
        parts that both have a ``gradient``, which show how parts are added; and a cut with a part that has none."""
        tensors = [v.shape[0] for v in self.batch.values() if isinstance(v, Tensor) and v.ndim]
        sizes = tensors or [len(v) for v in self.batch.values() if isinstance(v, list | tuple | np.ndarray)]
        if not sizes:
            raise self.error("batch", "it has no rows: give tensors or lists with an entry per row")
        rows = max(set(sizes), key=sizes.count)

        def parts(counts: Sequence[int]) -> list[dict[str, Any]]:
            return [rows_of(self.batch, rows, places) for places in torch.arange(rows).split(list(counts))]

        if self.split is not None:
            if sum(self.split) != rows:
                raise self.error(f"split={self.split}", f"its sum has to be {rows}, the rows of the batch")
            return [(list(self.split), parts(self.split), "")]
        uneven = [[n, rows - n] for n in range(max(1, rows // 4), rows) if 2 * n != rows or rows == 2] or [[rows]]
        first, few = uneven[0], uneven[:: max(1, len(uneven) // CUTS)]
        usual = next((c for c in few if all(_trains(gradient, part) for part in parts(c))), first)
        return [(usual, parts(usual), ""), *([(first, parts(first), IDLE)] if usual != first else [])]

    def _units(self, seen: Sequence[torch.dtype]) -> list[tuple[Tensor, float]]:
        """Trainable parameters, each with the unit in the last place of what is computed in."""
        declared = self.precision or coarsest(seen)
        return [(p, max(torch.finfo(d).eps for d in (p.dtype, declared or p.dtype))) for p in self._trained().values()]

    def _room(self, whole: Gradient, seen: Sequence[torch.dtype], again: Callable[[], Gradient]) -> tuple[float, float]:
        """What two gradients that ought to be equal may differ by, as for a ``Step``: 16 times (8 in 16 bits) what one
        unit in the last place of every parameter does, in what the step computes in; and the largest such unit."""
        units = self._units(seen)
        unit, each = max((own for _, own in units), default=0.0), iter(units)
        with moved((p for p, _ in units), lambda p, noise: p.abs() * next(each)[1] * noise.sign(), self.seed):
            floor = whole.distance(again())
        return min(0.5, 8 * max(floor, unit) if unit > COARSE else 16 * max(floor, 4 * unit)), unit


@dataclass
class Accumulation(_Gradients, name="accumulation"):
    """SE-ACCUMULATION: Many small backward passes, or many ranks, leave the whole batch's gradient, and so does the
    next call.

    accumulate(model, [B₁, B₂, …]) leaves in .grad what accumulate(model, [B₁ ∪ B₂ ∪ …]) does, UNEVENLY cut, and again
    accumulate(model, [B, B]) has the direction of accumulate(model, [B]), whatever is taken per micro-batch

    Needs: ``accumulate(model, batches)`` runs the micro-batches and leaves the gradients; ``split`` are row counts,
    uneven ones where that is legal. ``rows_interact``: a part of the loss is taken per micro-batch by design (a
    router). ``precision`` is what is computed in, where modules do not show it. ``stateful=True``: one call changes the
    next by design (a running statistic beside the model).
    How: The batch in one piece, once more, and cut unevenly (also with a part that has no gradient, if it can); the
    tolerance is 16 times (8 in 16 bits) the effect of one unit in the last place.
    Exceptions: With rows_interact=True the batch is only given twice. A clip that does not bind is not detected here:
    Update makes it bind.
    Detects: transformers' mean of means, and its #48690 (a router's loss times the ranks); gradients that are cleared
    """

    model: nn.Module
    accumulate: Callable[[nn.Module, Sequence[Mapping[str, Any]]], Any]
    batch: Mapping[str, Any]
    split: Sequence[int] | None = None
    what: str = "micro-batches"
    seed: int = 0
    rows_interact: bool = False
    precision: torch.dtype | None = None
    stateful: bool = False

    def _check(self) -> Iterator[Finding]:
        with noticing(self.model) as seen:
            whole, again = self._gradient([self.batch]), self._gradient([self.batch])
        none = self._has(whole, "The function leaves no gradient in .grad (no backward pass, or it clears it), or NaN.")
        if none.outcome == "fails":
            yield none
            return
        twice = self._twice(whole, again, seen)
        if self.rows_interact:  # equal micro-batches still have the gradient of one, up to a factor
            why = "Rows interact by declaration: parts may have another gradient."
            yield self.not_applicable(f"uneven {self.what}", "not checked", why)
            cuts = {f"the batch twice, as {self.what}": ([dict(self.batch), dict(self.batch)], COPIES)}
        else:
            made = self._cuts(lambda part: self._gradient([part]))
            cuts = {f"{self.what} of {split} rows": (parts, meaning + PARTS) for split, parts, meaning in made}
        room, _ = self._room(whole, seen, lambda: self._gradient([self.batch]))
        room = max(room, 8 * whole.distance(again))
        for subject, (parts, meaning) in cuts.items():
            found = self._gradient(parts)
            factor = found.best_scale(whole)
            meant, expected = (whole.times(factor), ", up to a factor") if self.rows_interact else (whole, "")
            off = meant.distance(found)
            measured = f"off by {off:.2g} (best factor {factor:.3g})"
            yield self.finding(subject, measured, f"≤ {room:.2g}{expected}", off <= room, _most(found, meant) + meaning)
        if not self.stateful:
            yield twice

    def _twice(self, whole: Gradient, again: Gradient, seen: Sequence[torch.dtype]) -> Finding:
        """Of two calls that differ, a third decides. Where it repeats one of them, or the calls are as 1 : 2 : 3, a
        call has left something for the next; noise, or a running statistic, does neither."""
        same = SAME * max((unit for _, unit in self._units(seen)), default=0.0)
        off, room = whole.distance(again), min(LEFT, SAME * same)
        subject, measured = "the same batch again", f"gradient off by {off:.2g}"
        if off > room:
            third, near = self._gradient([self.batch]), min(same, room / 2)
            repeats = min(whole.distance(third), again.distance(third)) <= near
            ways = ([(2, again), (3, third)], [(1 / 2, again), (1 / 3, third)])
            counted = any(all(whole.times(n).distance(g) <= near for n, g in way) for way in ways)
            if not (repeats or counted):
                why = "Every call gives another gradient: noise, or a running statistic. The tolerance is that wide."
                return self.not_applicable(subject, f"{measured}, and another way each time", why)
        why = "A second call gives another gradient: something of the first is left. (By design: stateful=True.)"
        return self.finding(subject, measured, f"≤ {room:.2g}", off <= room, why)

    def _gradient(self, batches: Sequence[Mapping[str, Any]]) -> Gradient:
        return self._made_by(lambda: self.accumulate(self.model, list(map(fresh, batches))))


@dataclass
class Update(_Gradients, name="update"):
    """SE-UPDATE: The optimizer receives the whole batch's gradient, clipped once, and nothing of the last update.

    p.grad at optimizer.step()  =  ∇loss(B₁ ∪ B₂ ∪ …) · min(1, max_grad_norm / ‖∇loss‖),   p: what the optimizer owns

    Needs: ``update(batches, max_grad_norm)`` makes one update of ``model`` by ``optimizer`` from these micro-batches:
    forward, backward, clip, step, and what clears the gradients. ``loss(model, batch)`` is a whole batch's loss. The
    optimizer owns the parameters, or copies with their shapes and values (fp32 masters). Both are restored; what else
    ``update`` moves (a schedule) is not. An update that never clips declares ``clips=False``: ``update(batches)``.
    How: Measured when the optimizer steps: uneven micro-batches (``split``) without a clip, with a clip at a
    twentieth of the gradient's norm, and the second of two updates. The tolerance is that of Accumulation.
    Exceptions: torch divides by norm + 1e-6 when it clips, which shortens a small gradient: that is allowed.
    Detects: lingua #59 and transformers #1563 (a clip per micro-batch), pytorch/examples #1196 (a clip before the
    unscaling), NeMo-RL #3788 (replicas counted twice in the norm), torchforge #71 (no zero_grad)
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    update: Callable[..., Any]
    loss: Callable[[nn.Module, Mapping[str, Any]], Any]
    batch: Mapping[str, Any]
    split: Sequence[int] | None = None
    precision: torch.dtype | None = None
    seed: int = 0
    clips: bool = True

    def _check(self) -> Iterator[Finding]:
        (_, parts, _), *idle = self._cuts(self._wanted)
        with noticing(self.model) as seen:
            wanted = self._wanted(self.batch)
        norm = wanted.norm()
        wide = 4 * (norm + STABILISER)  # a clip that does not bind
        room, unit = self._room(wanted, seen, lambda: self._wanted(self.batch))
        has = self._has(wanted, "The loss has no gradient here, so what the optimizer is given cannot be judged.")
        yield has
        if has.outcome == "fails":
            return
        self._grad_holders = self._owned()
        if not self._grad_holders:
            yield self.not_applicable("handed gradient", "the optimizer owns neither parameters nor copies of them")
            return
        wanted = wanted.only(self._grad_holders)
        with restored(self.model, self.optimizer):
            free = self._handed(parts, wide)
            yield (first := self._row("handed gradient, no clip", free, wanted, room, ANOTHER))
        for split, others, meaning in idle if first.outcome == "holds" else ():
            with restored(self.model, self.optimizer):
                handed = self._handed(others, wide)
                yield self._row(f"handed gradient, parts of {split} rows", handed, wanted, room, meaning + ANOTHER)
        if free is None:
            return
        # The same parts on the same weights: what the cut alone did is the room of what follows, where that is less.
        near = min(room, 4 * max(wanted.distance(free), unit if unit > COARSE else 4 * unit))
        if self.clips:
            own = wanted.norm()  # what is clipped is this norm, or that of all trainable parameters
            with restored(self.model, self.optimizer):
                handed = self._handed(parts, BINDS * own)
            meant = [wanted.times(BINDS * own / by) for by in (norm, norm + STABILISER, own, own + STABILISER) if by]
            clipped = meant[0] if handed is None else min(meant, key=handed.distance)
            yield self._row("handed gradient, with a clip that binds", handed, clipped, near, CLIPPED)
        if first.outcome == "fails":
            return  # the next update would fail for the same reason
        with restored(self.model, self.optimizer):
            self._handed(parts, wide)
            every = self._wanted(self.batch)
            after = every.only(self._grad_holders)
            near = min(TWICE, near * max(1.0, wanted.norm() / max(after.norm(), 1e-300)))  # a shorter one is coarser
            bound = (1.1 + 4 * near) * (every.norm() + STABILISER)  # a clip there binds if the last gradients are left
            handed = self._handed(parts, bound, clear=False)
            yield self._row("handed gradient, the next update", handed, after, near, LAST)

    def _owned(self) -> dict[str, Tensor]:
        """Parameter -> the tensor whose ``.grad`` the optimizer reads for it; empty where it has only others."""
        owned = {id(t): t for group in self.optimizer.param_groups for t in group["params"]}
        found = {n: owned.pop(id(p)) for n, p in self._trained().items() if id(p) in owned}
        for n, p in self._trained().items():
            alike = (i for i, t in owned.items() if t.shape == p.shape and torch.equal(t.detach().to(p), p.detach()))
            if n not in found and (place := next(alike, None)) is not None:
                found[n] = owned.pop(place)
        return {**self._trained(), **found} if found and owned else found  # what is left over are masters, unmatched

    def _handed(self, parts: Sequence[Mapping[str, Any]], max_grad_norm: float, clear: bool = True) -> Gradient | None:
        """What stood in ``.grad`` when the optimizer stepped; None where it did not step exactly once."""
        seen: list[Gradient] = []
        if clear:
            for p in [*self.model.parameters(), *self._grad_holders.values()]:
                p.grad = None
        handle = self.optimizer.register_step_pre_hook(lambda *_: seen.append(self._left(self._grad_holders)))
        try:
            with calling(self.seed, graph=True):
                self.update([fresh(b) for b in parts], *([max_grad_norm] if self.clips else []))
        finally:
            handle.remove()
        return seen[0] if len(seen) == 1 else None

    def _wanted(self, batch: Mapping[str, Any]) -> Gradient:
        def act() -> None:
            value = result_of(self.loss(self.model, fresh(batch)))[0]
            if value.requires_grad:
                value.backward()

        return self._made_by(act)


def _most(found: Gradient, wanted: Gradient) -> str:
    """The parameters that make up most of a difference."""
    parts = {n: 0.0 if g is None else float(g.norm()) for n, g in found.minus(wanted).parts.items()}
    most = sorted((n for n, off in parts.items() if not off <= 0.1 * max(parts.values())), key=lambda n: -parts[n])
    return f"Off most: {', '.join(most[:3])} ({len(most)} of {len(parts)} parameters). "


def _trains(gradient: Callable[[Mapping[str, Any]], Gradient], part: Mapping[str, Any]) -> bool:
    try:
        return gradient(part).norm() > 0
    except Exception:  # a part that is refused alone may be legal among others
        return True
