"""Measures a step under control: loss, metrics and gradient, from the same randomness every time.

``cost`` counts in step times: 1 for a gradient, a third for a look at loss and metrics. Readings of the declared batch,
and of every batch that is made by ``kept``, are kept for each state of the parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from earnest_audit.edits import Batch
from earnest_audit.errors import Undeclared
from earnest_audit.gradient import Gradient, nodes
from earnest_audit.restore import calling, copied, empty_grads, put_back
from earnest_audit.step import Loss, Step, StepError

T = TypeVar("T")
Inputs = Mapping[str, Any] | None  # a batch, or settings, in place of the declared ones
Result = tuple[Tensor, dict[str, float]]  # loss and metrics


@dataclass(frozen=True, eq=False)
class Reading:
    """Loss and metrics of a step, ∂loss/∂θ if that was computed, and for ``slopes`` ∂loss/∂input by role."""

    loss: float
    gradient: Gradient = Gradient({})
    metrics: Mapping[str, float] = field(default_factory=dict)
    inputs: Mapping[str, Tensor | None] = field(default_factory=dict)


class Measure:
    """A step whose loss, metrics and gradient are measured with one thing changed."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.parameters = step.trainable()
        self.cost = 0.0
        self.sparse: set[str] = set()  # parameters whose gradients are sparse
        self._state = "as it is"
        self._made: dict[tuple[str, str], Any] = {}
        self._kept: dict[tuple[str, int, str], Reading] = {}
        self._inner_grad = False  # whether the step's functions differentiate inside, and so always need a graph
        self._put_buffers_back: Callable[[], None] = lambda: None

    def gradient(self, batch: Inputs = None, knobs: Inputs = None, loss: Loss | None = None) -> Gradient:
        """∂loss/∂θ at the present parameters, with this batch and these settings in place of the declared ones."""
        return self.read(batch, knobs, loss).gradient

    def change(self, edited: Mapping[str, Any], base: Inputs = None, knobs: Inputs = None) -> float:
        """The relative change of the gradient from ``base`` to the ``edited`` batch."""
        return self.gradient(base, knobs).distance(self.gradient(edited, knobs))

    def own_gradient(self, knobs: Inputs = None, backward: Callable[..., Any] | None = None) -> Gradient:
        """The gradient that the run's own (or this) backward pass makes, or the loss's where none is declared."""
        backward = backward or self.step.backward
        if backward is None:
            return self.gradient(dict(self.step.batch) if self._state == "in training" else None, knobs)
        self.cost += 1
        with empty_grads(self.parameters.values()), calling(self.step.seed, graph=True):
            backward(self.settings(knobs))
            return self._named([p.grad for p in self.parameters.values()])

    def read(self, batch: Inputs = None, knobs: Inputs = None, loss: Loss | None = None) -> Reading:
        """Loss, metrics and gradient."""
        batch = self.step.batch if batch is None else batch
        lasting = loss is None and (batch is self.step.batch or any(batch is made for made in self._made.values()))
        key = self._key(batch, knobs)
        if lasting and key in self._kept:
            return self._kept[key]
        self.cost += 1
        value, metrics = self.run(batch, knobs, loss)
        reading = Reading(float(value.detach()), self.pull(value), metrics)
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
        """Without graphs, and dense."""
        self.sparse |= {n for n, g in zip(self.parameters, found, strict=True) if g is not None and g.is_sparse}
        parts = (None if g is None else g.detach().to_dense() for g in found)
        return Gradient(dict(zip(self.parameters, parts, strict=True)))

    def _key(self, batch: Mapping[str, Any], knobs: Inputs) -> tuple[str, int, str]:
        return self._state, id(batch), repr(sorted((knobs or {}).items()))

    def differentiate(self, value: Tensor, inputs: Sequence[Tensor], retain: bool = False) -> list[Tensor | None]:
        """∂value/∂input, None where the value does not reach it. Functions that are written in Python may run a
        backward pass inside (reentrant checkpointing): ``backward`` takes it along, ``autograd.grad`` may not."""
        if not value.requires_grad:
            return [None] * len(inputs)
        graph = list(nodes(value.grad_fn))
        if not any(isinstance(node, BackwardCFunction) for node in graph):
            return list(torch.autograd.grad(value, inputs, allow_unused=True, retain_graph=retain))
        reached = {id(t): t for t in (*inputs, *self.parameters.values(), *_filled(graph))}.values()
        hooks = [t._post_accumulate_grad_hooks for t in reached if t._post_accumulate_grad_hooks]
        with empty_grads(reached), put_back(hooks):
            for each in hooks:  # an update inside the backward, for example
                each.clear()
            value.backward(retain_graph=retain)
            return [t.grad for t in inputs]

    def look(self, batch: Inputs = None, knobs: Inputs = None) -> Reading:
        """Loss and metrics, without a gradient."""
        batch = self.step.batch if batch is None else batch
        if (key := self._key(batch, knobs)) in self._kept:
            return self._kept[key]
        self.cost += 1 / 3
        value, metrics = self.run(batch, knobs, None, graph=False)
        return Reading(float(value.detach()), metrics=metrics)

    def run(self, batch: Mapping[str, Any], knobs: Inputs, loss: Loss | None = None, graph: bool = True) -> Result:
        if self._state != "in training":  # what a forward pass wrote must not reach the next one
            self._put_buffers_back()
        return result_of(self._called(loss or self.step.loss, batch, graph, self.settings(knobs)))

    def _called(self, fn: Callable[..., Any], batch: Mapping[str, Any], graph: bool, knobs: Mapping[str, Any]) -> Any:
        """What the user's function gives for the model and a copy of the batch; always with a graph once it raised
        without one, as code does that differentiates inside (a gradient penalty)."""
        graph = graph or self._inner_grad
        try:
            with calling(self.step.seed, graph):
                return fn(self.step.model, fresh(batch), **knobs)
        except RuntimeError as error:
            if graph or "does not require grad" not in str(error):
                raise
        self._inner_grad = True
        return self._called(fn, batch, True, knobs)

    def settings(self, knobs: Inputs = None) -> dict[str, Any]:
        """The value of every setting, with ``knobs`` in place of the declared ones."""
        return {n: s.value for n, s in self.step.declared.items()} | dict(knobs or {})

    def forward(self, fn: Callable[..., Any] | None, batch: Inputs = None, graph: bool = True) -> Any:
        """What a declared function (``logprobs``, ``student``) gives for the model and this batch."""
        assert fn is not None
        self.cost += 1 if graph else 1 / 3
        found = self._called(fn, self.step.batch if batch is None else batch, graph, {})
        if graph and isinstance(found, Tensor) and not found.requires_grad:
            raise Undeclared("logprobs= and student= with a graph (without no_grad or inference_mode inside)")
        return found

    def now(self) -> Tensor:
        """The policy's log-probs in this state (``step.logprobs``, no graph); edits of signals do not change them."""
        return self.kept("log-probs", lambda: self.forward(self.step.logprobs, graph=False).detach())

    def slopes(self, roles: Sequence[str], batch: Mapping[str, Any], knobs: Inputs = None) -> Reading:
        """The loss with its derivatives by the parameters and by those of these inputs that are floats."""
        keys = {r: self.step.roles[r] for r in roles if r in self.step.roles}
        leaves = {
            r: batch[k].detach().clone().requires_grad_() for r, k in keys.items() if batch[k].is_floating_point()
        }
        self.cost += 1
        value, metrics = self.run({**batch, **{keys[r]: leaf for r, leaf in leaves.items()}}, knobs)
        found = self.differentiate(value, [*leaves.values(), *self.parameters.values()])
        inputs = dict(zip(leaves, found[: len(leaves)], strict=True))
        return Reading(float(value.detach()), self._named(found[len(leaves) :]), metrics, inputs)

    @contextmanager
    def along(self, direction: Gradient, length: float) -> Iterator[None]:
        """Inside, the parameters are ``length`` further along the direction; afterwards they have their old bits."""
        size = direction.norm()
        with put_back(self.parameters.values()):
            for n, p in self.parameters.items():
                if (g := direction.parts[n]) is not None:
                    p.detach().add_((g.double() * (length / size)).to(p.dtype))
            yield

    def reach(self, share: float) -> float:
        """A length: this share of the norm of all trainable parameters."""
        return share * max(Gradient({n: p.detach() for n, p in self.parameters.items()}).norm(), 1e-2)

    def kept(self, name: str, make: Callable[[], T]) -> T:
        """What is made once for each state of the parameters; readings of a batch that is made here are kept."""
        key = (self._state, name)
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made


def _filled(graph: Sequence[Any]) -> Iterator[Tensor]:
    """The leaves that a backward pass fills: the graph's, and parameters of modules that a checkpoint runs again."""
    for node in graph:
        rerun = getattr(node, "run_function", None)
        cells = [cell.cell_contents for cell in getattr(rerun, "__closure__", None) or ()]
        again = (m for m in (rerun, getattr(rerun, "__self__", None), *cells) if isinstance(m, nn.Module))
        leaf = getattr(node, "variable", None)
        yield from (*(p for m in again for p in m.parameters()), *([leaf] if isinstance(leaf, Tensor) else ()))


def fresh(batch: Mapping[str, Any]) -> Batch:
    """A copy that the loss may write into, at any depth."""
    return {k: copied(v) for k, v in batch.items()}


def result_of(result: Any) -> Result:
    """Loss and metrics, from whatever a step may return: loss, (loss, metrics), {"loss": …} or an object with .loss."""
    metrics: Any = None
    if isinstance(result, tuple) and result:
        result, metrics = (*result, None)[:2]
    elif isinstance(result, Mapping):
        metrics = {k: v for k, v in result.items() if k != "loss"}
    value = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
    if not isinstance(value, Tensor):
        what = type(result).__name__ + (" without a loss" if isinstance(result, Mapping) else "")
        raise StepError(f"the step returned {what}; return loss or (loss, dict of numbers).")
    if value.ndim != 0:
        raise StepError(f"the loss must be one number (its sum or mean), got shape {tuple(value.shape)}.")
    return value, numbers(metrics)


def numbers(metrics: Any) -> dict[str, float]:
    """name -> value, of the metrics that are real numbers, as a float can hold them."""
    named = metrics.items() if isinstance(metrics, Mapping) else ()
    return {str(name): number(value) for name, value in named if is_number(value)}


def is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex()
    return abs(value) <= sys.float_info.max if isinstance(value, int) else isinstance(value, Real | np.bool_)


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
