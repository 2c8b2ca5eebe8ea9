"""Runs a step under control: the same randomness every time, one thing changed, and everything restored.

``Probe.gradient(batch, settings)`` is the measurement of most laws. While a probe is open, dropout is off and
the hooks of the optimizer's step are disabled. When it closes, the model's parameters, buffers, gradients, modes and
hooks, its dropout rates, the optimizer and all random generators are bit for bit what they were. What a loss keeps in a
closure of its own cannot be seen, and so cannot be restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from earnest.audit import edits
from earnest.audit.gradient import Gradient
from earnest.audit.restore import copied, no_graph_asked, perturbation_sizes, without_dropout
from earnest.audit.restore import restored as restored
from earnest.audit.restore import seeded as seeded
from earnest.audit.restore import without_graph as without_graph
from earnest.audit.step import Loss, Step, StepError
from earnest.audit.verdict import Finding


@dataclass(frozen=True, eq=False)
class Reading:
    """One evaluation of a step: its loss, its metrics, and its gradient if that was computed."""

    loss: float
    metrics: Mapping[str, float]
    gradient: Gradient


class Probe:
    """A step whose gradient is measured with one thing changed.

    ``cost`` counts in step times: 1 for a gradient, a third for a look at the loss and its metrics. Readings of the
    declared, the off-policy and the on-policy batch are kept for as long as the parameters are in the same state.
    """

    def __init__(self, step: Step, say: Callable[[str], None] | None = None) -> None:
        self.step, self.say = step, say or (lambda _: None)
        self.parameters = step.trainable()
        self.cost = 0.0
        self._state = "as it is"
        self._batches: dict[tuple[str, str], dict[str, Any]] = {}
        self._kept: dict[tuple[str, int, str], Reading] = {}
        self._now: dict[str, Tensor] = {}
        self._floor: float | None = None
        self._noise: float | None = None
        self._random: bool | None = None
        self._by_backward: bool | None = None  # whether autograd.grad will not do; not known yet
        self._precision = step.precision
        self._precision_known = step.precision is not None
        self._active: Step | None = None
        self._buffers: list[_Buffer] = []
        self.notes: tuple[str, ...] = ()

    # --- measuring ----------------------------------------------------------------------------------------------------

    def gradient(
        self, batch: Mapping[str, Any] | None = None, knobs: Mapping[str, Any] | None = None, loss: Loss | None = None
    ) -> Gradient:
        """∂loss/∂θ at the model's present parameters, with this batch and these settings in place of the declared
        ones."""
        return self.read(batch, knobs, loss).gradient

    def own_gradient(
        self, knobs: Mapping[str, Any] | None = None, backward: Callable[[Mapping[str, Any]], Any] | None = None
    ) -> Gradient:
        """The gradient that the run's own (or this) backward pass makes, or the loss's where none is declared."""
        backward = backward or self.step.backward
        if backward is None:
            return self.gradient(dict(self.step.batch) if self._state == "in training" else None, knobs)
        self.cost += 1
        kept = {n: p.grad for n, p in self.parameters.items()}
        try:
            for p in self.parameters.values():
                p.grad = None
            with seeded(self.step.seed), torch.enable_grad():
                backward(self.settings(knobs))
            return Gradient({n: p.grad for n, p in self.parameters.items()})
        finally:
            for n, p in self.parameters.items():
                p.grad = kept[n]

    def read(
        self, batch: Mapping[str, Any] | None = None, knobs: Mapping[str, Any] | None = None, loss: Loss | None = None
    ) -> Reading:
        """Loss, metrics and gradient."""
        batch = self.step.batch if batch is None else batch
        lasting = loss is None and (batch is self.step.batch or any(batch is b for b in self._batches.values()))
        key = (self._state, id(batch), repr(sorted((knobs or {}).items())))
        if lasting and key in self._kept:
            return self._kept[key]
        self.cost += 1
        value, metrics = self._run(batch, knobs, loss)
        if self._by_backward is None:
            found = self._first_gradient(value, batch, knobs, loss)
        else:
            found = self.differentiate(value, list(self.parameters.values()))
        gradient = Gradient({n: None if g is None else g.detach() for n, g in zip(self.parameters, found, strict=True)})
        reading = Reading(float(value.detach()), metrics, gradient)
        if lasting:
            self._kept[key] = reading
        return reading

    def _first_gradient(
        self, value: Tensor, batch: Mapping[str, Any], knobs: Mapping[str, Any] | None, loss: Loss | None
    ) -> list[Tensor | None]:
        """The gradient, and whether it has to be read by ``backward``: reentrant checkpointing refuses
        ``autograd.grad``, or silently gives none where all parameters lie inside it. So where
        some are missing the gradient is computed again by ``backward``."""
        inputs, refused = list(self.parameters.values()), False
        try:
            found = self.differentiate(value, inputs)
        except RuntimeError as error:
            if "use_reentrant=True" not in str(error):
                raise
            refused, found = True, [None] * len(inputs)
        self._by_backward = False
        if not value.requires_grad or all(g is not None for g in found):
            return found
        self.cost += 1
        self._by_backward = True
        again = self.differentiate(self._run(batch, knobs, loss)[0], inputs)
        self._by_backward = refused or any(a is None and b is not None for a, b in zip(found, again, strict=True))
        return again if self._by_backward else found

    def differentiate(self, value: Tensor, inputs: Sequence[Tensor], retain: bool = False) -> list[Tensor | None]:
        """∂value/∂input, None where the value does not reach it, with no ``.grad`` left over.

        By ``autograd.grad``; where the step is checkpointed reentrantly, by ``backward``, while the parameters' own
        hooks are disabled.
        """
        if not value.requires_grad:
            return [None] * len(inputs)
        if not self._by_backward:
            return list(torch.autograd.grad(value, inputs, allow_unused=True, retain_graph=retain))
        reached = {id(t): t for t in (*inputs, *self.parameters.values())}  # backward() fills every leaf there is
        kept = [(t, t.grad, dict(t._post_accumulate_grad_hooks or {})) for t in reached.values()]
        try:
            for t, _, hooks in kept:
                t.grad = None
                if hooks:  # an update inside the backward, say
                    t._post_accumulate_grad_hooks.clear()
            value.backward(retain_graph=retain)
            return [t.grad for t in inputs]
        finally:
            for t, grad, hooks in kept:
                t.grad = grad
                if hooks:
                    t._post_accumulate_grad_hooks.update(hooks)

    def look(self, batch: Mapping[str, Any] | None = None, knobs: Mapping[str, Any] | None = None) -> Reading:
        """Loss and metrics, without a gradient."""
        batch = self.step.batch if batch is None else batch
        key = (self._state, id(batch), repr(sorted((knobs or {}).items())))
        if key in self._kept:
            return self._kept[key]
        self.cost += 1 / 3
        with torch.no_grad():
            value, metrics = self._run(batch, knobs, None, graph=False)
        return Reading(float(value), metrics, Gradient({}))

    def _run(
        self,
        batch: Mapping[str, Any],
        knobs: Mapping[str, Any] | None,
        loss: Loss | None,
        graph: bool = True,
        seed: int | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        if self._state != "in training":  # what a forward pass wrote down must not reach the next one
            for buffer in self._buffers:
                buffer.put_back()
        with seeded(self.step.seed if seed is None else seed), torch.set_grad_enabled(graph), no_graph_asked(graph):
            return result_of((loss or self.step.loss)(self.step.model, fresh(batch), **self.settings(knobs)))

    def settings(self, knobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Every setting and the first mode of every option, with ``knobs`` in their place."""
        return {**self.step.knobs, **{o: m[0] for o, m in self.step.options.items()}, **(knobs or {})}

    def slope(self, role: str, batch: Mapping[str, Any], knobs: Mapping[str, Any] | None = None) -> Tensor | None:
        """∂loss/∂input for a floating-point input, or None where the loss does not reach it."""
        key = self.step.roles[role]
        leaf = batch[key].detach().clone().requires_grad_()
        self.cost += 1
        with seeded(self.step.seed), torch.enable_grad():
            result = self.step.loss(self.step.model, {**fresh(batch), key: leaf}, **self.settings(knobs))
            return self.differentiate(result_of(result)[0], [leaf])[0]

    def now(self) -> Tensor:
        """The policy's log-probs in this state (``step.logprobs``, no graph); edits of signals do not change them."""
        step = self.step
        assert step.logprobs is not None
        if self._state not in self._now:
            self.cost += 1 / 3
            with without_graph(step.seed):
                self._now[self._state] = step.logprobs(step.model, fresh(step.batch)).detach()
        return self._now[self._state]

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
                there = float(self._run(self.step.batch, None, None, graph=False, seed=self.step.seed + 1)[0])
            self._random = abs(here - there) > 4 * self.noise() * max(abs(here), abs(there))
        return self._random

    def fair(self, finding: Finding) -> Finding:
        """For laws that reorder or resize rows: a failure of a random step is not judged."""
        fails = finding.outcome == "fails" and self.random()
        return self.redrawn(finding.law, finding.subject) if fails else finding

    def redrawn(self, law: str, subject: str) -> Finding:
        why = "The loss differs between two seeds: other rows, or another number of them, get other draws."
        return Finding(law, subject, "the step is random", "-", "not applicable", why)

    def floor(self) -> float:
        """Relative change of the gradient when every parameter moves by one unit in the last place.

        It is how well this step in this dtype is conditioned; a change that matters must stand well above it.
        """
        if self._floor is None:
            self._floor = self.resolution(None)
        return self._floor

    def resolution(self, batch: Mapping[str, Any] | None) -> float:
        """``floor``, measured now and on this batch."""
        before = self.gradient(batch)
        floor = self.coarsest if self.coarse else 4 * self.coarsest
        with self.moved("nudged", lambda p, noise: p.detach().abs() * self._eps(p) * noise.sign()):
            after = self.gradient(batch)
        return max(before.distance(after), self.noise(), floor)

    @property
    def coarsest(self) -> float:
        """The largest unit in the last place, of the parameters or of what the modules compute in."""
        self._find_precision()
        return max(self._eps(p) for p in self.step.model.parameters() if p.is_floating_point())

    @property
    def coarse(self) -> bool:
        """bf16 or fp16: there the measured floor is used, since a multiple of eps would let anything pass."""
        return self.coarsest > 1e-4

    def _eps(self, p: Tensor) -> float:
        own, coarse = torch.finfo(p.dtype).eps, self._precision
        return own if coarse is None else max(own, torch.finfo(coarse).eps)

    @property
    def tolerance(self) -> float:
        """What two gradients that ought to be equal may differ by, relatively."""
        return min(0.5, (8 if self.coarse else 16) * self.floor())

    def same(self, a: Gradient, b: Gradient) -> bool:
        return a.distance(b) <= self.tolerance

    def differs(self, a: Gradient, b: Gradient) -> bool:
        """Whether anything changed at all: any bit for a deterministic step, more than its noise otherwise."""
        return a.distance(b) > 4 * self.noise()

    # --- moving the policy --------------------------------------------------------------------------------------------

    @contextmanager
    def moved(self, state: str, by: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
        """Inside, every trainable parameter p is p + by(p, standard normal noise); afterwards it has its old bits.

        ``state`` names where that is: the same name from the same place must mean the same bits.
        """
        outer, self._state = self._state, f"{self._state}, {state}"
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

    def off_policy(self) -> dict[str, Any]:
        """``edits.off_policy``, with behaviour log-probs around the policy's own, where these are known:
        whole rows on either side of ratio 1, so that token and sequence ratios both leave their clips both ways."""
        return self.kept_batch("off-policy", self._off_policy)

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

    def kept_batch(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A batch that is made once for this state of the parameters, so that its readings can be kept."""
        key = (self._state, name)
        if key not in self._batches:
            self._batches[key] = make()
        return self._batches[key]

    def _off_policy(self) -> dict[str, Any]:
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

    @contextmanager
    def open(self) -> Iterator[Probe]:
        """The whole audit runs inside; on the way out everything is restored."""
        own_update = self.step.update is not None
        with (
            restored(self.step.model, self.step.optimizer, own_update=own_update),
            without_dropout(self.step.model) as rates,
        ):
            if rates:
                self.notes = (f"dropout was switched off for the audit ({rates} rates above 0)",)
            self._buffers = list(_buffers(self.step.model))
            self._sums = self._sum()
            if self.step.backward is None:  # or else when a law compares gradients: the run's own pass needs less
                self._find_precision()
            try:
                yield self
            finally:
                for buffer in self._buffers:
                    buffer.put_back()

    def written(self) -> list[str]:
        """The trainable parameters that are not what they were when the audit began."""
        return [name for name, total in self._sum().items() if total != self._sums[name]]

    def written_again(self) -> list[str]:
        """The trainable parameters that one more call of the loss changes by more than rounding."""
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.look(dict(self.step.batch))
        return [n for n, p in self.parameters.items()
                if not torch.allclose(p.detach(), before[n], rtol=4 * torch.finfo(p.dtype).eps, atol=0)]  # fmt: skip

    def _sum(self) -> dict[str, float]:
        return {name: float(p.detach().sum(dtype=torch.float64)) for name, p in self.parameters.items()}

    def _find_precision(self) -> None:
        if self._precision_known:
            return
        self._precision_known = True
        if (found := self._computes_in()) is not None:
            self._precision = found
            self.notes += (f"its modules compute in {str(found).removeprefix('torch.')}, and so tolerances do",)

    def _computes_in(self) -> torch.dtype | None:
        """The dtype of a module's output, where it is coarser than the module's own parameters (autocast)."""
        seen: list[torch.dtype] = []

        def look(module: nn.Module, _args: Any, output: Any) -> None:
            own = [p.dtype for p in module.parameters(recurse=False) if p.is_floating_point()]
            given = output.dtype if isinstance(output, Tensor) and output.is_floating_point() else None
            if own and given and torch.finfo(given).eps > max(torch.finfo(d).eps for d in own):
                seen.append(given)

        hooks = [m.register_forward_hook(look) for m in self.step.model.modules()]
        try:
            if (self._state, id(self.step.batch), "[]") in self._kept:  # a kept reading would not run the modules
                self.look(dict(self.step.batch))
            else:
                self.read()
        finally:
            for hook in hooks:
                hook.remove()
        return max(seen, key=lambda d: torch.finfo(d).eps, default=None)

    # --- what it may cost ---------------------------------------------------------------------------------------------

    @property
    def budget(self) -> float:
        """The most that a full audit costs, in step times: 20 + 2 × (inputs + settings + modes + terms)."""
        step = self.step
        return 20 + 2 * (len(step.roles) + len(step.knobs) + sum(map(len, step.options.values())) + len(step.terms))

    def afford(self, more: float, keep: float = 4.0) -> bool:
        """Whether ``more`` step times can be spent on a closer look, and ``keep`` are left for later laws."""
        return self.cost + more + keep <= self.budget


class _Buffer:
    """A buffer of the model as it was, whether it is written into or replaced."""

    def __init__(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        self.module, self.name, self.tensor = module, name, tensor
        self.kept, self.version = tensor.detach().clone(), tensor._version

    def put_back(self) -> None:
        if self.module._buffers.get(self.name) is not self.tensor:
            self.module._buffers[self.name] = self.tensor
        if self.tensor._version != self.version:
            with torch.no_grad():
                self.tensor.copy_(self.kept)
            self.version = self.tensor._version


def _buffers(model: nn.Module) -> Iterator[_Buffer]:
    for module in model.modules():
        for name, tensor in module._buffers.items():
            if tensor is not None and not tensor.is_inference():
                yield _Buffer(module, name, tensor)


def fresh(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that the loss may write into, at any depth."""
    return {k: copied(v) for k, v in batch.items()}


def result_of(result: Any) -> tuple[Tensor, dict[str, float]]:
    """Loss and metrics, from whatever a step may return: loss, (loss, metrics), {"loss": …} or an object with .loss."""
    metrics: Any = None
    if isinstance(result, tuple) and result:
        result, metrics = result[0], result[1] if len(result) > 1 else None
    elif isinstance(result, Mapping):
        metrics = {k: v for k, v in result.items() if k != "loss"}
    value = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
    if not isinstance(value, Tensor):
        what = type(result).__name__ + (" without a loss" if isinstance(result, Mapping) else "")
        raise StepError(f"the step returned {what}; return loss or (loss, dict of numbers).")
    if value.ndim != 0:
        raise StepError(
            f"the loss must be one number (a tensor without dimensions), got shape {tuple(value.shape)}; return its "
            "sum or mean."
        )
    numbers = metrics.items() if isinstance(metrics, Mapping) else ()
    return value, {name: number(metric) for name, metric in numbers if is_number(metric)}


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor | np.generic) and np.ndim(value) == 0)


def number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
