"""State that an audit restores bit for bit: random generators, the model, the optimizer, dropout rates."""

from __future__ import annotations

import copy
import dataclasses
import random
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import DataLoader, Dataset

from earnest_audit.errors import EarnestError

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
CONFIGS = ("config", "cfg")
RANDOM = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
Rate = tuple[dict[str, Any], str, float]  # a dropout rate and where it belongs


@contextmanager
def undone(*undos: Callable[[], object]) -> Iterator[None]:
    """On the way out all of these are called twice, as an interrupt may come in between: each puts back what was
    remembered before anything changed."""
    try:
        try:
            yield
        finally:
            for undo in undos:
                undo()
    finally:
        for undo in undos:
            undo()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, Python's, NumPy's and torch's generators start from ``seed``; then the process is as it was."""
    with put_back(process()):
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (the user's code may use the global generator)
        torch.manual_seed(seed)
        yield


def process() -> list[Any]:
    """The global random generators, and the modules that hold autograd's mode and the filters of warnings."""
    if torch.cuda.is_available():
        torch.cuda.init()
    return [random, np.random, torch, warnings, torch.default_generator, *torch.cuda.default_generators]


@contextmanager
def replaced(owner: Any, attributes: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the object has these attributes."""
    own = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    with undone(*(partial(vars(owner).pop, name, None) for name in attributes), partial(vars(owner).update, own)):
        vars(owner).update(attributes)
        yield


def put_back(values: Iterable[Any]) -> AbstractContextManager[None]:
    """These tensors (dicts, lists, …) have their old bits on the way out."""
    return undone(remembered(values))


@contextmanager
def moved(tensors: Iterable[Tensor], by: Callable[[Tensor, Tensor], Tensor], seed: int) -> Iterator[None]:
    """Inside, every tensor t is t + by(t, standard normal noise); afterwards it has its old bits."""
    generator, tensors = torch.Generator().manual_seed(seed), list(tensors)
    with put_back(tensors):
        for t in tensors:
            noise = torch.randn(t.shape, generator=generator).to(t.device, torch.float32)
            t.detach().add_(by(t.detach(), noise).to(t.dtype))
        yield


@contextmanager
def empty_grads(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, ``.grad`` is empty at first; afterwards it is what it was."""
    tensors = list(tensors)
    with undone(*(partial(setattr, t, "grad", t.grad) for t in tensors)):
        for t in tensors:
            t.grad = None
        yield


@contextmanager
def observed(modules: Iterable[nn.Module], hook: Callable[..., Any], before: bool = False) -> Iterator[None]:
    """Inside, ``hook(module, inputs, output)`` is called after each forward pass of these modules, or
    ``hook(module, inputs)`` before it. Hooks that a model adds meanwhile stay."""
    modules = list(modules)

    def remove() -> None:
        for hooks in (m._forward_pre_hooks if before else m._forward_hooks for m in modules):
            for key in [key for key, other in hooks.items() if other is hook]:
                del hooks[key]

    with undone(remove):
        for m in modules:
            m.register_forward_pre_hook(hook) if before else m.register_forward_hook(hook)
        yield


@contextmanager
def calling(seed: int, graph: bool) -> Iterator[None]:
    """For one call of the user's code. Reentrant checkpointing warns where it is called without a graph."""
    with seeded(seed), nullcontext() if graph else warnings.catch_warnings():
        torch.set_grad_enabled(graph)
        if not graph:
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        yield


@contextmanager
def restored(model: nn.Module, optimizer: torch.optim.Optimizer | None, *, own_update: bool = False) -> Iterator[None]:
    """Everything that the modules and the optimizer hold (see ``held_by``) has its old bits on the way out, and so have
    gradients, flags, modes and what the process holds. Inside, hooks of the optimizer's step are disabled: what they do
    outside could not be restored. With ``own_update`` they run, and frozen parameters are not restored."""
    frozen = [p for p in model.parameters() if own_update and not p.requires_grad]
    reached = held_by([model, optimizer], frozen)
    with put_back([*reached, *process()]):
        for value in reached:
            for name in HOOKS if isinstance(value, torch.optim.Optimizer) and not own_update else ():
                vars(value).get(name, {}).clear()
        yield


def buffers(model: nn.Module) -> Callable[[], None]:
    """A function that puts the model's buffers back, whether they are written into or replaced."""
    return remembered([*(m._buffers for m in model.modules() if m._buffers), *model.buffers()])


def remembered(values: Iterable[Any]) -> Callable[[], None]:
    """A function that puts back what each of these holds: tensors, arrays, dicts, lists, deques, sets, modules,
    optimizers and random generators. The members of a container are values of their own."""
    undos = [each for value in values if (each := _undo(value)) is not None]

    def undo() -> None:
        for each in undos:
            each()

    return undo


def held_by(roots: Iterable[Any], without: Iterable[Any] = ()) -> list[Any]:
    """What modules and optimizers hold, at any depth of containers, themselves included: each object once. Of other
    objects those that a module has as attributes are entered, and no deeper: a trainer leads to everything.
    (``load_state_dict`` casts to the parameter's dtype, and replaces groups that a schedule holds.)"""
    seen, todo, found = {id(value) for value in without}, list(roots), list[Any]()
    while todo:
        value: Any = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        found.append(value)
        if isinstance(value, nn.Module):
            todo += (vars(v) if _has_attributes(v) else v for v in vars(value).values())
        elif isinstance(value, torch.optim.Optimizer):
            todo += vars(value).values()
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list | tuple | deque | set):
            todo += value
    return found


def _has_attributes(value: Any) -> bool:
    """Whether it is an object with state of its own: a configuration, running statistics. Data sets are only read."""
    others = (Tensor, nn.Module, torch.optim.Optimizer, dict, list, Dataset, DataLoader, *RANDOM)
    code = (type, FunctionType, MethodType, ModuleType)
    return not isinstance(value, others + code) and isinstance(getattr(value, "__dict__", None), dict)


def not_restored(model: nn.Module) -> list[str]:
    """The attributes of modules that can only be read once, by name."""
    owners = ((f"{path}." if path else "", module) for path, module in model.named_modules())
    return [f"{path}{n}" for path, module in owners for n, v in vars(module).items() if isinstance(v, Iterator)]


def _undo(value: Any) -> Callable[[], object] | None:
    """A function that puts back what it holds; None where it cannot change in place."""
    if isinstance(value, Tensor):
        bits, grad = value.detach().clone(), value.grad if value.is_leaf else None
        return None if value.is_inference() else partial(_rewrite, value, bits, value.requires_grad, grad)
    if isinstance(value, np.ndarray):
        return partial(np.copyto, value, value.copy()) if value.flags.writeable else None
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if value is torch:
        return partial(torch.set_grad_enabled, torch.is_grad_enabled())
    if value is warnings:
        return partial(setattr, warnings, "filters", warnings.filters)
    if value is np.random or isinstance(value, (torch.Generator, np.random.RandomState)):
        owner: Any = value
        return partial(owner.set_state, owner.get_state())
    if value is random or isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    holder = vars(value) if isinstance(value, nn.Module | torch.optim.Optimizer) else value
    return partial(_refill, holder, copy.copy(holder)) if isinstance(holder, dict | list | deque | set) else None


def _rewrite(t: Tensor, content: Tensor, flag: bool, grad: Tensor | None) -> None:
    if t.shape != content.shape or t.dtype != content.dtype:
        t.data = content.clone()
    elif t.layout != torch.strided or not torch.equal(_bits(t), _bits(content)):
        t.detach().copy_(content)
    if t.is_leaf:
        t.grad = grad
        t.requires_grad_(flag)


def _refill(holder: Any, content: Any) -> None:
    now, before = ([*map(id, c), *map(id, c.values() if isinstance(c, dict) else ())] for c in (holder, content))
    if now != before:
        holder.clear()
        (holder.extend if isinstance(holder, list | deque) else holder.update)(content)


def held(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Every plain tensor that an optimizer keeps beside its parameters, at any depth."""
    owned = [p for group in optimizer.param_groups for p in group["params"]]
    return (value for value in held_by([optimizer], owned) if type(value) in (Tensor, nn.Parameter))


def _bits(t: Tensor) -> Tensor:
    """As bytes, so that NaN equals itself and -0 differs from 0."""
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[list[Rate]]:
    """Inside, every dropout rate of the model is 0; yields those that were not. A fixed seed is not enough, as another
    order or number of rows gives the same tokens other masks; nor is ``eval``, which changes BatchNorm and which a loss
    may undo. Rates are those of dropout modules, and floats between 0 and 1 with "drop" in their name on modules and on
    their configs, which functional dropout reads at run time."""
    rates: list[Rate] = []
    for module in model.modules():
        own = vars(module)
        for place in (own, *(vars(own[c]) for c in CONFIGS if hasattr(own.get(c), "__dict__"))):
            for name, value in place.items():
                rate = "drop" in name.lower() or (place is own and name == "p" and isinstance(module, _DropoutNd))
                if rate and isinstance(value, float) and 0 < value <= 1:
                    rates.append((place, name, value))
    with undone(partial(_set, rates)):
        _set(rates, 0.0)
        yield rates


@contextmanager
def with_dropout(rates: list[Rate]) -> Iterator[None]:
    """Inside ``without_dropout``, the rates as the user has them."""
    with undone(partial(_set, rates, 0.0)):
        _set(rates)
        yield


def _set(rates: Iterable[Rate], rate: float | None = None) -> None:
    for place, name, value in rates:
        place[name] = value if rate is None else rate


def copied(value: Any) -> Any:
    """A copy that may be written into: tensors, arrays and the containers that hold them, at any depth."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Generator):
        raise EarnestError("the batch has a generator, which can be read only once: give a list.")
    return rebuilt(value, copied) if is_container(value) else copy.copy(value)


def is_container(value: Any) -> bool:
    a_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return a_record or isinstance(value, Mapping | list | tuple | SimpleNamespace)


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same kind of container, with ``change`` of every entry."""
    if isinstance(value, Mapping):
        new: Any = copy.copy(value) if hasattr(value, "__setitem__") else {}  # a BatchEncoding stays one
        for k, v in value.items():
            new[k] = change(v)
        return new
    if not isinstance(value, list | tuple):  # a dataclass, frozen perhaps, or a namespace
        new = copy.copy(value)
        for name in vars(value) if hasattr(value, "__dict__") else (f.name for f in dataclasses.fields(value)):
            object.__setattr__(new, name, change(getattr(value, name)))
        return new
    parts = [change(v) for v in value]
    if isinstance(value, list):
        return parts
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def perturbed(tensors: Sequence[Tensor], size: float) -> AbstractContextManager[None]:
    """Inside, every tensor has noise of ``perturbation_sizes``."""
    sizes = iter(perturbation_sizes(tensors, size))
    return moved(tensors, lambda _, noise: next(sizes) * noise, seed=0)


def perturbation_sizes(parameters: Iterable[Tensor], size: float) -> list[float]:
    """The standard deviation of each parameter's perturbation: ``size`` times its rms (a typical one where it is 0)."""
    rms = [float(p.detach().float().square().mean().sqrt()) for p in parameters]
    alive = sorted(r for r in rms if r > 0)
    typical = alive[len(alive) // 2] if alive else 1.0
    return [size * (r if r > 0 else typical) for r in rms]
