"""Measures a step under control: loss, metrics and gradient, from the same randomness every time.

``Measure.gradient(batch, settings)`` is the measurement of most laws. ``cost`` counts in step times: 1 for a gradient,
a third for a look at the loss and its metrics. Readings of the declared, the off-policy and the on-policy batch are
kept for as long as the parameters are in the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from earnest_audit.gradient import Gradient
from earnest_audit.restore import calling, copied, empty_grads, put_back, remembered
from earnest_audit.step import Loss, Step, StepError

Batch = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Reading:
    """One evaluation of a step: its loss, its metrics, and its gradient if that was computed."""

    loss: float
    metrics: Mapping[str, float]
    gradient: Gradient


@dataclass(frozen=True, eq=False)
class Slopes:
    """One evaluation: the loss, ∂loss/∂θ, and ∂loss/∂input for declared inputs (None where it does not reach)."""

    loss: float
    gradient: Gradient
    inputs: Mapping[str, Tensor | None]


class Measure:
    """A step whose loss, metrics and gradient are measured with one thing changed."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.parameters = step.trainable()
        self.cost = 0.0
        self._state = "as it is"
        self._batches: dict[tuple[str, str], Batch] = {}
        self._kept: dict[tuple[str, int, str], Reading] = {}
        self._now: dict[str, Tensor] = {}
        self._by_backward: bool | None = None  # whether autograd.grad will not do; not known yet
        self._put_buffers_back: Callable[[], None] = lambda: None

    def gradient(
        self, batch: Mapping[str, Any] | None = None, knobs: Mapping[str, Any] | None = None, loss: Loss | None = None
    ) -> Gradient:
        """∂loss/∂θ at the model's present parameters, with this batch and these settings in place of the declared
        ones."""
        return self.read(batch, knobs, loss).gradient

    def change(
        self, edited: Mapping[str, Any], base: Mapping[str, Any] | None = None, knobs: Mapping[str, Any] | None = None
    ) -> float:
        """The relative change of the gradient from ``base`` to the ``edited`` batch."""
        return self.gradient(base, knobs).distance(self.gradient(edited, knobs))

    def own_gradient(
        self, knobs: Mapping[str, Any] | None = None, backward: Callable[[Mapping[str, Any]], Any] | None = None
    ) -> Gradient:
        """The gradient that the run's own (or this) backward pass makes, or the loss's where none is declared."""
        backward = backward or self.step.backward
        if backward is None:
            return self.gradient(dict(self.step.batch) if self._state == "in training" else None, knobs)
        self.cost += 1
        with empty_grads(self.parameters.values()), calling(self.step.seed, graph=True):
            backward(self.settings(knobs))
            return Gradient({n: p.grad for n, p in self.parameters.items()})

    def read(
        self, batch: Mapping[str, Any] | None = None, knobs: Mapping[str, Any] | None = None, loss: Loss | None = None
    ) -> Reading:
        """Loss, metrics and gradient."""
        batch = self.step.batch if batch is None else batch
        lasting = loss is None and (batch is self.step.batch or any(batch is b for b in self._batches.values()))
        key = self._key(batch, knobs)
        if lasting and key in self._kept:
            return self._kept[key]
        self.cost += 1
        value, metrics = self.run(batch, knobs, loss)
        if self._by_backward is None:
            found = self._first_gradient(value, batch, knobs, loss)
        else:
            found = self.differentiate(value, list(self.parameters.values()))
        reading = Reading(float(value.detach()), metrics, self._named(found))
        if lasting:
            self._kept[key] = reading
        return reading

    def logged(self, name: str) -> list[float]:
        """A metric's values so far, in all readings that are kept and have the step's own settings."""
        return [r.metrics[name] for (*_, knobs), r in self._kept.items() if knobs == "[]" and name in r.metrics]

    def pull(self, value: Tensor, retain: bool = False) -> Gradient:
        """∂value/∂θ of a number that was computed with a graph."""
        return self._named(self.differentiate(value, list(self.parameters.values()), retain))

    def _named(self, found: Sequence[Tensor | None]) -> Gradient:
        return Gradient({n: None if g is None else g.detach() for n, g in zip(self.parameters, found, strict=True)})

    def _key(self, batch: Mapping[str, Any], knobs: Mapping[str, Any] | None) -> tuple[str, int, str]:
        return self._state, id(batch), repr(sorted((knobs or {}).items()))

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
        again = self.differentiate(self.run(batch, knobs, loss)[0], inputs)
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
        reached = {id(t): t for t in (*inputs, *self.parameters.values())}.values()  # backward() fills every leaf
        hooks = remembered(t._post_accumulate_grad_hooks for t in reached if t._post_accumulate_grad_hooks)
        with empty_grads(reached):
            try:
                for t in reached:
                    if t._post_accumulate_grad_hooks:  # an update inside the backward, for example
                        t._post_accumulate_grad_hooks.clear()
                value.backward(retain_graph=retain)
                return [t.grad for t in inputs]
            finally:
                hooks()

    def look(self, batch: Mapping[str, Any] | None = None, knobs: Mapping[str, Any] | None = None) -> Reading:
        """Loss and metrics, without a gradient."""
        batch = self.step.batch if batch is None else batch
        if (key := self._key(batch, knobs)) in self._kept:
            return self._kept[key]
        self.cost += 1 / 3
        with torch.no_grad():
            value, metrics = self.run(batch, knobs, None, graph=False)
        return Reading(float(value), metrics, Gradient({}))

    def run(
        self, batch: Mapping[str, Any], knobs: Mapping[str, Any] | None, loss: Loss | None = None, graph: bool = True,
        seed: int | None = None,
    ) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
        if self._state != "in training":  # what a forward pass wrote down must not reach the next one
            self._put_buffers_back()
        with calling(self.step.seed if seed is None else seed, graph):
            return result_of((loss or self.step.loss)(self.step.model, fresh(batch), **self.settings(knobs)))

    def settings(self, knobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Every setting and the first mode of every option, with ``knobs`` in their place."""
        return {**self.step.knobs, **{o: m[0] for o, m in self.step.options.items()}, **(knobs or {})}

    def forward(self, fn: Callable[..., Any] | None, batch: Mapping[str, Any] | None = None, graph: bool = True) -> Any:
        """What a declared function (``logprobs``, ``student``) gives for the model and this batch."""
        assert fn is not None
        batch = fresh(self.step.batch if batch is None else batch)
        self.cost += 1 if graph else 1 / 3
        with calling(self.step.seed, graph):
            return fn(self.step.model, batch)

    def now(self) -> Tensor:
        """The policy's log-probs in this state (``step.logprobs``, no graph); edits of signals do not change them."""
        if self._state not in self._now:
            self._now[self._state] = self.forward(self.step.logprobs, graph=False).detach()
        return self._now[self._state]

    def slopes(self, roles: Sequence[str], batch: Mapping[str, Any], knobs: Mapping[str, Any] | None = None) -> Slopes:
        """The loss with its derivatives by the parameters and by those of these inputs that are floats."""
        named = {r: self.step.roles[r] for r in roles if r in self.step.roles}
        leaves = {
            r: batch[k].detach().clone().requires_grad_() for r, k in named.items() if batch[k].is_floating_point()
        }
        self.cost += 1
        value, _ = self.run({**batch, **{named[r]: leaf for r, leaf in leaves.items()}}, knobs)
        found = self.differentiate(value, [*leaves.values(), *self.parameters.values()])
        inputs = dict(zip(leaves, found[: len(leaves)], strict=True))
        return Slopes(float(value.detach()), self._named(found[len(leaves) :]), inputs)

    @contextmanager
    def along(self, direction: Gradient, length: float) -> Iterator[None]:
        """Inside, the parameters are ``length`` further along the direction; afterwards they have their old bits."""
        size = direction.norm()
        with put_back(self.parameters.values()):
            with torch.no_grad():
                for n, p in self.parameters.items():
                    if (g := direction.parts[n]) is not None:
                        p.add_((g.double() * (length / size)).to(p.dtype))
            yield

    def reach(self, share: float) -> float:
        """A length: this share of the norm of all trainable parameters."""
        return share * max(Gradient({n: p.detach() for n, p in self.parameters.items()}).norm(), 1e-2)

    def kept_batch(self, name: str, make: Callable[[], Batch]) -> Batch:
        """A batch that is made once for this state of the parameters, so that its readings can be kept."""
        key = (self._state, name)
        if key not in self._batches:
            self._batches[key] = make()
        return self._batches[key]


def fresh(batch: Mapping[str, Any]) -> Batch:
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


class RecordingBatch(dict[str, Any]):
    """A batch that records which keys are read. Iterating over it, or copying it, reads all of them."""

    def __init__(self, values: Any = ()) -> None:
        super().__init__(values)
        self.accessed: set[Any] = set()


def _recording(name: str, one: bool) -> Callable[..., Any]:
    """A method of dict that records the key that it is called with, or all keys."""

    def method(batch: RecordingBatch, *args: Any) -> Any:
        batch.accessed |= {args[0]} if one else set(dict.keys(batch))
        return getattr(dict, name)(batch, *args)

    return method


for _name in ("__getitem__", "get", "pop", "__contains__"):
    setattr(RecordingBatch, _name, _recording(_name, one=True))
for _name in ("__iter__", "keys", "values", "items", "copy", "__or__"):
    setattr(RecordingBatch, _name, _recording(_name, one=False))
