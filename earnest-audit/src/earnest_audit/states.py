"""The resolution of a measured step, and the states it is measured in: perturbed, off-policy, active, in training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from earnest_audit import edits
from earnest_audit.gradient import Gradient
from earnest_audit.measure import Batch, Measure
from earnest_audit.precision import COARSE, coarsest, noticing
from earnest_audit.restore import moved, perturbation_sizes, restored
from earnest_audit.step import Step


class States(Measure):
    """What a change has to exceed to be one, and the ways to leave the given state."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._floor: float | None = None
        self._noise: float | None = None
        self._random: bool | None = None
        self._precision = step.precision
        self._precision_known = step.precision is not None
        self._active: Step | None = None
        self.notes: tuple[str, ...] = ()

    # --- resolution ---------------------------------------------------------------------------------------------------

    def noise(self) -> float:
        """Relative change of the gradient when nothing at all changes: 0 for a deterministic step."""
        if self._noise is None:
            again = self.read(dict(self.step.batch)).gradient  # a copy, so that it is really run again
            self._noise = self.gradient().distance(again)
        return self._noise

    def random(self) -> bool:
        """Whether the loss differs between two seeds, dropout being off: it samples, and so other rows get other
        draws."""
        if self._random is None:
            self.cost += 1 / 3
            here = self.look().loss
            with torch.no_grad():
                there = float(self.run(self.step.batch, None, graph=False, seed=self.step.seed + 1)[0])
            self._random = abs(here - there) > 4 * self.noise() * max(abs(here), abs(there))
        return self._random

    def floor(self) -> float:
        """Relative change of the gradient when every parameter moves by one unit in the last place.

        It is how well this step in this dtype is conditioned; a change that matters must stand well above it.
        """
        if self._floor is None:
            before = self.gradient()
            floor = self.coarsest if self.coarse else 4 * self.coarsest
            with self.moved("nudged", lambda p, noise: p.detach().abs() * self._eps(p) * noise.sign()):
                after = self.gradient()
            self._floor = max(before.distance(after), self.noise(), floor)
        return self._floor

    @property
    def coarsest(self) -> float:
        """The largest unit in the last place, of the parameters or of what the modules compute in."""
        self.find_precision()
        return max(self._eps(p) for p in self.step.model.parameters() if p.is_floating_point())

    @property
    def coarse(self) -> bool:
        """bf16 or fp16: there the measured floor is used, since a multiple of eps would let anything pass."""
        return self.coarsest > COARSE

    def _eps(self, p: Tensor) -> float:
        own, coarse = torch.finfo(p.dtype).eps, self._precision
        return own if coarse is None else max(own, torch.finfo(coarse).eps)

    @property
    def tolerance(self) -> float:
        """What two gradients that ought to be equal may differ by, relatively."""
        return min(0.5, (8 if self.coarse else 16) * self.floor())

    @property
    def value_room(self) -> float:
        """The relative difference up to which two loss values count as equal, without comparing gradients: a mean over
        tokens is more exact than a gradient."""
        return min(self.tolerance, (1 if self.coarse else 16) * self.coarsest)

    def differs(self, a: Gradient, b: Gradient) -> bool:
        """Whether anything changed at all: any bit for a deterministic step, more than its noise otherwise."""
        return a.distance(b) > 4 * self.noise()

    def find_precision(self) -> None:
        if self._precision_known:
            return
        self._precision_known = True
        with noticing(self.step.model) as seen:
            if self._key(self.step.batch, None) in self._kept:  # a kept reading would not run the modules
                self.look(dict(self.step.batch))
            else:
                self.read()
        if (found := coarsest(seen)) is not None:
            self._precision = found
            self.notes += (f"its modules compute in {str(found).removeprefix('torch.')}, and so tolerances do",)

    # --- moving the policy --------------------------------------------------------------------------------------------

    @contextmanager
    def moved(self, state: str, by: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
        """``moved`` for every trainable parameter. ``state`` names where that is: the same name from the same place
        must mean the same bits."""
        outer, self._state = self._state, f"{self._state}, {state}"
        try:
            with moved(self.parameters.values(), by, self.step.seed + 17):
                yield
        finally:
            self._state = outer

    @contextmanager
    def perturbed(self, size: float = 0.05) -> Iterator[None]:
        """Away from symmetric and zero states: every parameter gets noise of ``size`` times its own (or a typical)
        rms."""
        sizes = iter(perturbation_sizes(self.parameters.values(), size))
        with self.moved(f"perturbed by {size}", lambda _, noise: next(sizes) * noise):
            yield

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, every term is active that ``step.active`` can activate: thresholds are within reach, and the
        parameters are perturbed where that is needed."""
        declared, outer = self.step.active, self.step
        if declared is None or self._active is outer:
            yield
            return
        if self._active is None:
            self._active = replace(outer, knobs={**outer.knobs, **declared.settings})
        self.step = self._active
        state, self._state = self._state, f"{self._state}, active"
        try:
            with self.perturbed(declared.perturb) if declared.perturb else nullcontext():
                yield
        finally:
            self.step, self._state = outer, state

    @contextmanager
    def training(self) -> Iterator[None]:
        """Inside, parameters may change; readings made there are not kept."""
        outer, kept, batches, now = self._state, dict(self._kept), dict(self._batches), dict(self._now)
        self._state = "in training"
        try:
            with restored(self.step.model, self.step.optimizer, own_update=self.step.update is not None):
                yield
        finally:
            self._state, self._kept, self._batches, self._now = outer, kept, batches, now

    # --- the batches of these states ----------------------------------------------------------------------------------

    def off_policy(self) -> Batch:
        """``edits.off_policy``, with behaviour log-probs around the policy's own, where these are known:
        whole rows on either side of ratio 1, so that token and sequence ratios both leave their clips both ways."""
        return self.kept_batch("off-policy", self._off_policy)

    def _off_policy(self) -> Batch:
        step, batch = self.step, edits.off_policy(self.step)
        if step.logprobs is None or step.ratio_role not in step.roles:
            return batch
        key = step.roles[step.ratio_role]
        now = self.now().to(batch[key].dtype).reshape(batch[key].shape)
        rng = edits.generator(step, 9)
        rows = torch.arange(len(now), device=now.device, dtype=now.dtype)
        side = torch.where(rows % 2 == 0, 1.0, -1.0) * 0.4 * 0.1 ** (3 * rows / max(len(now), 2))
        spread = 10 ** (edits.noise_like(now, rng).clamp(-2, 0.5) - 0.3)  # from ratios of almost 1 to some of 5
        on = edits.fit(edits.supervised(step, batch), now)
        wander = spread * edits.noise_like(now, rng)
        if now.ndim == 2:  # a row's own mean stays at its side of ratio 1, however near that is
            taken = torch.ones_like(now) if on is None else on.to(now.dtype)
            wander = wander - (wander * taken).sum(-1, keepdim=True) / taken.sum(-1, keepdim=True).clamp(min=1)
        moved = (now + side.reshape(-1, *[1] * (now.ndim - 1)) + wander).clamp(max=-1e-3)
        batch[key] = moved if on is None else torch.where(on, moved, batch[key])
        return batch

    def as_policy(self, batch: Mapping[str, Any], roles: tuple[str, ...] = edits.SAMPLERS) -> Batch:
        """The batch in which these roles are the policy's own log-probs."""
        keys = [self.step.roles[r] for r in roles if r in self.step.roles]
        now = self.now()
        return {**batch, **{k: now.to(batch[k].dtype).reshape(batch[k].shape) for k in keys}}
