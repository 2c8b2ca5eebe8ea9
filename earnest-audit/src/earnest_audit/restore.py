"""State that an audit restores bit for bit: random generators, the model, the optimizer, dropout rates."""

from __future__ import annotations

import copy
import random
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from earnest_audit.errors import EarnestError

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
CONFIGS = ("config", "cfg")
_OFF: WeakKeyDictionary[nn.Module, list[tuple[dict[str, Any], str, float]]] = WeakKeyDictionary()
"""The dropout rates of a model that are switched off, and where they belong."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Python's, NumPy's and torch's generators start from ``seed`` inside, and are as they were afterwards."""
    python, devices = random.getstate(), list(range(torch.cuda.device_count()))
    numeric = np.random.get_state()  # noqa: NPY002 (the user's code may use the global generator)
    try:
        with torch.random.fork_rng(devices=devices):
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numeric)  # noqa: NPY002


@contextmanager
def replaced(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the object has these attributes."""
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(owner)[name]
        vars(owner).update(own)


@contextmanager
def put_back(tensors: Iterable[Tensor]) -> Iterator[None]:
    """These tensors have their old bits on the way out."""
    undo = remembered(tensors)
    try:
        yield
    finally:
        undo()


@contextmanager
def moved(tensors: Iterable[Tensor], by: Callable[[Tensor, Tensor], Tensor], seed: int) -> Iterator[None]:
    """Inside, every tensor t is t + by(t, standard normal noise); afterwards it has its old bits."""
    generator, tensors = torch.Generator().manual_seed(seed), list(tensors)
    with put_back(tensors):
        with torch.no_grad():
            for t in tensors:
                noise = torch.randn(t.shape, generator=generator).to(t.device, torch.float32)
                t.add_(by(t, noise).to(t.dtype))
        yield


@contextmanager
def empty_grads(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, ``.grad`` is empty at first; afterwards it is what it was."""
    kept = [(t, t.grad) for t in tensors]
    try:
        for t, _ in kept:
            t.grad = None
        yield
    finally:
        for t, grad in kept:
            t.grad = grad


@contextmanager
def observed(modules: Iterable[nn.Module], hook: Callable[..., Any], before: bool = False) -> Iterator[None]:
    """Inside, ``hook(module, inputs, output)`` is called after each forward pass of these modules; or
    ``hook(module, inputs)`` before it."""
    handles = [m.register_forward_pre_hook(hook) if before else m.register_forward_hook(hook) for m in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def calling(seed: int, graph: bool) -> Iterator[None]:
    """For one call of the user's code. Without a graph, reentrant checkpointing warns that its inputs need no gradient;
    here that is intended."""
    with seeded(seed), torch.set_grad_enabled(graph), nullcontext() if graph else warnings.catch_warnings():
        if not graph:
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        yield


@contextmanager
def restored(model: nn.Module, optimizer: torch.optim.Optimizer | None, *, own_update: bool = False) -> Iterator[None]:
    """Parameters, buffers, gradients, flags, modes and the optimizer have their old bits on the way out.

    Inside, hooks of the optimizer's step are disabled: what they do outside (count, average, log) could not be
    restored. With ``own_update`` they run, and frozen parameters are neither copied nor restored.
    """
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    if own_update:
        tensors = {i: t for i, t in tensors.items() if t.requires_grad or not isinstance(t, nn.Parameter)}
    if optimizer is not None:
        tensors |= {id(p): p for group in optimizer.param_groups for p in group["params"]}
    reached = [] if optimizer is None else held_by(optimizer)
    kept = [(t, t.requires_grad, t.grad) for t in tensors.values()]
    modes = {id(m): m.training for m in model.modules()}
    undo = remembered([*tensors.values(), *reached])
    if not own_update:
        for value in reached:
            for name in HOOKS if isinstance(value, torch.optim.Optimizer) else ():
                vars(value).get(name, {}).clear()
    try:
        yield
    finally:
        undo()
        for t, flag, grad in kept:
            t.grad = grad
            if t.requires_grad != flag:
                t.requires_grad_(flag)
        for m in model.modules():
            m.training = modes.get(id(m), m.training)


def buffers(model: nn.Module) -> Callable[[], None]:
    """A function that puts the model's buffers back, whether they are written into or replaced."""
    places = [m._buffers for m in model.modules() if m._buffers]
    return remembered([*places, *(b for b in model.buffers() if not b.is_inference())])


def remembered(values: Iterable[Any]) -> Callable[[], None]:
    """A function that puts what these tensors, dicts, lists and optimizers hold back into them."""
    holders = [vars(value) if isinstance(value, torch.optim.Optimizer) else value for value in values]
    tensors = [(t, t.detach().clone()) for t in holders if isinstance(t, Tensor)]
    members = [(held, copy.copy(held)) for held in holders if isinstance(held, dict | list | deque | set)]

    def undo() -> None:
        for held, content in members:
            held.clear()
            (held.extend if isinstance(held, list | deque) else held.update)(content)
        with torch.no_grad():
            for t, old in tensors:
                if t.shape != old.shape or t.dtype != old.dtype:
                    t.data = old.clone()
                elif not torch.equal(_bits(t), _bits(old)):
                    t.detach().copy_(old)

    return undo


def held_by(optimizer: torch.optim.Optimizer) -> list[Any]:
    """What an optimizer keeps beside its parameters, at any depth, itself included: each object once. To put it back,
    ``load_state_dict`` would not do: it casts to the parameter's dtype, and replaces groups that a schedule holds."""
    seen = {id(p) for group in optimizer.param_groups for p in group["params"]}
    todo, found = [optimizer], list[Any]()
    while todo:
        value: Any = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        found.append(value)
        if isinstance(value, torch.optim.Optimizer):
            todo += vars(value).values()
        elif isinstance(value, Mapping):
            todo += value.values()
        elif isinstance(value, list | tuple | deque | set):
            todo += value
    return found


def held(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every plain tensor that an optimizer keeps beside its parameters, at any depth."""
    return (value for value in held_by(optimizer) if type(value) in (Tensor, nn.Parameter))


def _bits(t: Tensor) -> Tensor:
    """As bytes, so that NaN equals itself and -0 differs from 0."""
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[int]:
    """Inside, every dropout rate of the model is 0; yields how many were not. Modes stay, so BatchNorm is as it was.

    A fixed seed is not enough: another order or number of rows hands other masks to the same tokens. Rates are found
    in dropout modules, and in floats between 0 and 1 with "drop" in their name on modules and on their configs, which
    functional dropout reads at run time. A rate of 0 also survives a loss that calls ``model.train()``.
    """
    rates: list[tuple[dict[str, Any], str, float]] = []
    for module in model.modules():
        own = vars(module)
        for place in (own, *(vars(own[c]) for c in CONFIGS if hasattr(own.get(c), "__dict__"))):
            for name, value in place.items():
                rate = "drop" in name.lower() or (place is own and name == "p" and isinstance(module, _DropoutNd))
                if rate and isinstance(value, float) and 0 < value <= 1:
                    rates.append((place, name, value))
                    place[name] = 0.0
    outer = _OFF.get(model, [])
    _OFF[model] = outer + rates
    try:
        yield len(rates)
    finally:
        _OFF[model] = outer
        for place, name, value in rates:
            place[name] = value


@contextmanager
def with_dropout(model: nn.Module) -> Iterator[int]:
    """Inside ``without_dropout``, the rates as the user has them; yields how many there are."""
    rates = _OFF.get(model, [])
    for place, name, value in rates:
        place[name] = value
    try:
        yield len(rates)
    finally:
        for place, name, _ in rates:
            place[name] = 0.0


def copied(value: Any) -> Any:
    """A copy that may be written into: tensors, arrays and the containers that hold them, at any depth."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Generator):
        raise EarnestError("the batch has a generator, which can be read only once: give a list.")
    return rebuilt(value, copied) if is_container(value) else copy.copy(value)


def is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same kind of container, with ``change`` of every entry."""
    if isinstance(value, Mapping):
        entries = {k: change(v) for k, v in value.items()}
        if type(value) is dict or not hasattr(value, "__setitem__"):
            return entries
        new: Any = copy.copy(value)  # a BatchEncoding stays one
        for k, v in entries.items():
            new[k] = v
        return new
    parts = [change(v) for v in value]
    if isinstance(value, list):
        return parts
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def perturbation_sizes(parameters: Iterable[Tensor], size: float = 0.05) -> list[float]:
    """The standard deviation of each parameter's perturbation: ``size`` times its rms, or a typical rms where it is
    0."""
    rms = [float(p.detach().float().square().mean().sqrt()) for p in parameters]
    alive = sorted(r for r in rms if r > 0)
    typical = alive[len(alive) // 2] if alive else 1.0
    return [size * (r if r > 0 else typical) for r in rms]
