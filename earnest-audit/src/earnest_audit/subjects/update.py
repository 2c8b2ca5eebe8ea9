"""SE-UPDATE: The optimizer receives the whole batch's gradient, clipped once, and nothing of the last update.

p.grad at optimizer.step()  =  ∇loss(B₁ ∪ B₂ ∪ …) · min(1, max_grad_norm / ‖∇loss‖)

Needs: model, optimizer, update(batches, max_grad_norm), loss(model, batch) of a whole batch, and a batch
How: Measured when the optimizer steps: uneven micro-batches without a clip, with a clip at half the gradient's norm,
and the second of two updates. The tolerance is that of Accumulation.
Exceptions: A clip that does not bind hides errors, so one that binds is set. A schedule or a loss scale that the update
changes is not restored. torch divides by norm + 1e-6 when it clips, which shortens a small gradient: that is allowed.
Detects: lingua #59 and transformers #1563 (a clip per micro-batch), pytorch/examples #1196 (a clip before the
unscaling), NeMo-RL #3788 (replicas counted twice in the norm), torchforge #71 (no zero_grad)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit.gradient import Gradient
from earnest_audit.law import Law
from earnest_audit.precision import COARSE, coarsest, noticing
from earnest_audit.probe import fresh, result_of
from earnest_audit.restore import restored, seeded, without_dropout
from earnest_audit.subjects import base
from earnest_audit.verdict import Finding

TWICE = 0.25  # two gradients that are added are off by about a half: the room has to stay below
BINDS = 0.5  # of the gradient's norm: a clip that does not bind hides where and how it is done
STABILISER = 1e-6  # what torch's clip_grad_norm_ adds to the norm before it divides

ANOTHER = (
    "The optimizer is given another gradient than the whole batch's: a mean of means, a scale that is not taken off, "
    "only the last micro-batch, or a clip that acts below its norm."
)
CLIPPED = (
    "Where the clip binds, the optimizer is given another gradient: it is clipped per micro-batch, before the loss "
    "scale is taken off, by a norm that counts a part twice or not at all, or never."
)
LAST = "The next update is given something of the last one: gradients are not cleared (zero_grad) between two updates."


@dataclass
class Update:
    """``update(batches, max_grad_norm)`` makes one update of ``model`` by ``optimizer`` from these micro-batches:
    forward, backward, clip, step, and what clears the gradients. ``loss(model, batch)`` is a whole batch's loss.

    The model and the optimizer are restored; a schedule or a loss scale that ``update`` also moves is the caller's.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    update: Callable[[Sequence[Mapping[str, Any]], float], Any]
    loss: Callable[[nn.Module, Mapping[str, Any]], Any]
    batch: Mapping[str, Any]
    split: Sequence[int] | None = None
    precision: torch.dtype | None = None
    seed: int = 0

    def check(self) -> Iterator[Finding]:
        with restored(self.model, self.optimizer), without_dropout(self.model):
            yield from list(self._check())

    def _check(self) -> Iterator[Finding]:
        _, parts = base.cut(self.batch, self.split)
        with noticing(self.model) as seen:
            wanted = self._wanted()
        norm = wanted.norm()
        room, unit = base.room_of(self.model, self.seed, self.precision or coarsest(seen), wanted, self._wanted)
        trains = math.isfinite(norm) and norm > 0
        why = "The loss has no gradient here, so what the optimizer is given cannot be judged."
        yield LAW.finding("the whole batch's gradient", f"norm {norm:.3g}", "finite and above 0", trains, why)
        if not trains:
            return
        with restored(self.model, self.optimizer):
            free = self._handed(parts, 4 * (norm + STABILISER))
            yield self._row("handed gradient, no clip", free, wanted, room, ANOTHER)
        if free is None:
            return
        # The same parts on the same weights: what the cut alone did is the room of what follows, where that is less.
        own = max(wanted.distance(free), unit if unit > COARSE else 4 * unit)
        with restored(self.model, self.optimizer):
            handed = self._handed(parts, BINDS * norm)
            near = min(room, 4 * own)
            meant = [wanted.times(BINDS), wanted.times(BINDS * norm / (norm + STABILISER))]
            clipped = meant[0] if handed is None else min(meant, key=handed.distance)
            yield self._row("handed gradient, clip at half its norm", handed, clipped, near, CLIPPED)
        with restored(self.model, self.optimizer):
            self._handed(parts, 4 * (norm + STABILISER))
            after = self._wanted()
            handed = self._handed(parts, 4 * (norm + STABILISER), clear=False)
            near *= max(1.0, norm / max(after.norm(), 1e-300))  # a shorter one is coarser, relatively
            yield self._row("handed gradient, the next update", handed, after, min(TWICE, near), LAST)

    def _row(self, subject: str, found: Gradient | None, wanted: Gradient, room: float, meaning: str) -> Finding:
        if found is None:
            once = "One update must step the optimizer once; it steps once per micro-batch, or not at all."
            return LAW.finding(subject, "not one call of optimizer.step()", "one call per update", False, once)
        factor = found.best_scale(wanted)
        return LAW.agrees(subject, wanted.distance(found), room, meaning, f"off by {{}} (best factor {factor:.3g})")

    def _handed(self, parts: Sequence[Mapping[str, Any]], max_grad_norm: float, clear: bool = True) -> Gradient | None:
        """What stood in ``.grad`` when the optimizer stepped; None where it did not step exactly once."""
        seen: list[Gradient] = []
        if clear:
            for p in self.model.parameters():
                p.grad = None
        handle = self.optimizer.register_step_pre_hook(lambda *_: seen.append(base.left_in(self.model)))
        try:
            with seeded(self.seed), torch.enable_grad():
                self.update([fresh(b) for b in parts], max_grad_norm)
        finally:
            handle.remove()
        return seen[0] if len(seen) == 1 else None

    def _wanted(self) -> Gradient:
        def act() -> None:
            value: Tensor = result_of(self.loss(self.model, fresh(self.batch)))[0]
            if value.requires_grad:
                value.backward()

        return base.gradient_of(self.model, self.seed, act)


LAW = Law("SE-UPDATE", "update (Update)", __doc__, Update.check)
