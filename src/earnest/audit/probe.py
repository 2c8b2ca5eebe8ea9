"""Running somebody's step under control: the same randomness every time, one thing changed, and everything put back.

``Probe.gradient(batch, knobs)`` is the one measurement behind most laws. While a probe is open, the model's parameters,
buffers, gradients, modes and hooks, the optimizer's state and all random generators are the user's; when it closes they are bit
for bit what they were. What a loss keeps in a closure of its own cannot be seen, and so cannot be put back.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from earnest.audit import edits
from earnest.audit.gradient import Gradient
from earnest.audit.step import Loss, Step, StepError


class Probe:
    """A step that can be asked what its gradient would be if one thing were different."""

    def __init__(self, step: Step, say: Callable[[str], None] | None = None) -> None:
        self.step, self.say = step, say or (lambda _: None)
        self.parameters = step.trainable()
        self.evaluations = 0  # gradients and losses taken: the audit's cost in step times
        self._floor: float | None = None
        self._noise: float | None = None

    # --- measuring ----------------------------------------------------------------------------------------------------

    def gradient(
        self, batch: Mapping[str, Any] | None = None, knobs: Mapping[str, Any] | None = None, loss: Loss | None = None
    ) -> Gradient:
        """∂loss/∂θ at the model's present parameters, with this batch and these knobs in place of the declared ones."""
        value, _ = self.evaluate(batch, knobs, loss)
        if not value.requires_grad:
            return Gradient(dict.fromkeys(self.parameters))
        found = torch.autograd.grad(value, list(self.parameters.values()), allow_unused=True)
        return Gradient({n: None if g is None else g.detach() for n, g in zip(self.parameters, found, strict=True)})

    def evaluate(
        self, batch: Mapping[str, Any] | None = None, knobs: Mapping[str, Any] | None = None, loss: Loss | None = None
    ) -> tuple[Tensor, dict[str, float]]:
        """(loss with its graph, metrics as numbers)."""
        self.evaluations += 1
        settings = {**self.step.knobs, **{o: m[0] for o, m in self.step.options.items()}, **(knobs or {})}
        with seeded(self.step.seed), torch.enable_grad():
            result = (loss or self.step.loss)(self.step.model, fresh(batch or self.step.batch), **settings)
        value, metrics = result if isinstance(result, tuple) else (result, {})
        if not isinstance(value, Tensor) or value.ndim != 0:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise StepError(
                f"the loss must be one number (a tensor without dimensions), got {what}; return its sum or mean."
            )
        return value, {name: number(metric) for name, metric in dict(metrics).items() if is_number(metric)}

    # --- resolution ---------------------------------------------------------------------------------------------------

    def noise(self) -> float:
        """Relative change of the gradient when nothing at all changes: 0 for a deterministic step."""
        if self._noise is None:
            self._noise = self.gradient().distance(self.gradient())
        return self._noise

    def floor(self) -> float:
        """Relative change of the gradient when every parameter moves by one unit in the last place.

        It is how well this step in this dtype is conditioned; a change that matters must stand well above it.
        """
        if self._floor is None:
            self._floor = self.resolution(self.step.batch)
        return self._floor

    def resolution(self, batch: Mapping[str, Any]) -> float:
        """``floor``, measured now and on this batch."""
        before = self.gradient(batch)
        with self.moved(lambda p, noise: p.detach().abs() * torch.finfo(p.dtype).eps * noise.sign()):
            after = self.gradient(batch)
        eps = max(torch.finfo(p.dtype).eps for p in self.step.model.parameters() if p.is_floating_point())
        return max(before.distance(after), self.noise(), 4 * eps)

    @property
    def tolerance(self) -> float:
        """What two gradients that ought to be equal may differ by, relatively."""
        return min(0.5, 16 * self.floor())

    def same(self, a: Gradient, b: Gradient) -> bool:
        return a.distance(b) <= self.tolerance

    def differs(self, a: Gradient, b: Gradient) -> bool:
        """Whether anything changed at all: any bit for a deterministic step, more than its noise otherwise."""
        return a.distance(b) > 4 * self.noise()

    # --- moving the policy --------------------------------------------------------------------------------------------

    @contextmanager
    def moved(self, by: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
        """Inside, every trainable parameter p is p + by(p, standard normal noise); afterwards it has its old bits."""
        generator = torch.Generator().manual_seed(self.step.seed + 17)
        kept = {n: p.detach().clone() for n, p in self.parameters.items()}
        try:
            with torch.no_grad():
                for p in self.parameters.values():
                    noise = torch.randn(p.shape, generator=generator).to(p.device, torch.float32)
                    p.add_(by(p, noise).to(p.dtype))
            yield
        finally:
            with torch.no_grad():
                for n, p in self.parameters.items():
                    p.copy_(kept[n])

    @contextmanager
    def kicked(self, size: float = 0.05) -> Iterator[None]:
        """Away from symmetric and zero states: every parameter gets noise of ``size`` times its own (or a typical) rms."""
        rms = [float(p.detach().float().square().mean().sqrt()) for p in self.parameters.values()]
        alive = sorted(r for r in rms if r > 0)
        typical = alive[len(alive) // 2] if alive else 1.0

        def by(p: Tensor, noise: Tensor) -> Tensor:
            own = float(p.detach().float().square().mean().sqrt())
            return size * (own if own > 0 else typical) * noise

        with self.moved(by):
            yield

    def off_policy(self) -> dict[str, Any]:
        """``edits.off_policy``, with the behaviour policy set around what the policy says now, where that can be asked:
        whole rows on either side of ratio 1, so that token and sequence ratios both leave their clips both ways."""
        step, batch = self.step, edits.off_policy(self.step)
        if step.logprobs is None or "behaviour" not in step.roles:
            return batch
        key = step.roles["behaviour"]
        with seeded(step.seed), torch.no_grad():
            now = step.logprobs(step.model, fresh(batch)).detach().to(batch[key].dtype).reshape(batch[key].shape)
        rng = edits.generator(step, 9)
        rows = torch.arange(len(now), device=now.device, dtype=now.dtype)
        side = torch.where(rows % 2 == 0, 1.0, -1.0) * 0.4 * 0.1 ** (3 * rows / max(len(now), 2))
        spread = 10 ** (edits.noise_like(now, rng).clamp(-2, 0.5) - 0.3)  # from ratios of almost 1 to some of 5
        moved = now + side.reshape(-1, *[1] * (now.ndim - 1)) + spread * edits.noise_like(now, rng)
        moved = moved.clamp(max=-1e-3)
        on = edits.fit(edits.supervised(step, batch), now)
        batch[key] = moved if on is None else torch.where(on, moved, batch[key])
        return batch

    @contextmanager
    def open(self) -> Iterator[Probe]:
        """The whole audit runs inside; on the way out everything is the user's again."""
        with restored(self.step.model, self.step.optimizer):
            yield self


def fresh(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that the loss may write into."""
    return {k: v.clone() if isinstance(v, Tensor) else copy.copy(v) for k, v in batch.items()}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor | np.generic) and np.ndim(value) == 0)


def number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, NumPy's and torch's generators start from ``seed`` inside, and are as they were afterwards."""
    python, numeric, devices = random.getstate(), np.random.get_state(), list(range(torch.cuda.device_count()))
    try:
        with torch.random.fork_rng(devices=devices):
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002 (the user's code may use the global generator)
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numeric)  # noqa: NPY002


@contextmanager
def restored(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Parameters, buffers, gradients, flags, modes and the optimizer's state have their old bits on the way out."""
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    if optimizer is not None:
        tensors |= {id(p): p for group in optimizer.param_groups for p in group["params"]}
    kept = {i: (t.detach().clone(), t.requires_grad, t.grad) for i, t in tensors.items()}
    modes = {id(m): m.training for m in model.modules()}
    state = copy.deepcopy(optimizer.state_dict()) if optimizer is not None else None
    try:
        yield
    finally:
        with torch.no_grad():
            for i, t in tensors.items():
                value, flag, grad = kept[i]
                if not torch.equal(_bits(t), _bits(value)):
                    t.copy_(value)
                t.grad = grad
                if t.requires_grad != flag:
                    t.requires_grad_(flag)
        for m in model.modules():
            m.training = modes.get(id(m), m.training)
        if optimizer is not None and state is not None:
            optimizer.load_state_dict(state)


def _bits(t: Tensor) -> Tensor:
    """As bytes, so that NaN equals itself and -0 differs from 0."""
    return (
        t.detach().contiguous().reshape(-1).view(torch.uint8) if t.element_size() and not t.is_complex() else t.detach()
    )
