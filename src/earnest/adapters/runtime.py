"""How adapters are installed in a model: slots on a layer, gates, and the forward that runs them.

A layer with adapters stays the same object with the same weight; only its class is replaced by a
subclass with another ``forward`` (so `isinstance`, deepcopy, hooks, checkpointing and torch.compile see a normal
module). Its slots are child modules: `model.parameters()` includes the adapter's parameters, `model.state_dict()` has
only the base's. For a variant that replaces parameters (full-parameter training) the subclass keeps the forward and
has properties instead: reading `module.weight` gives the weight with the adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from earnest.adapters.errors import AdapterError
from earnest.adapters.kernel import Around, Factors, low_rank
from earnest.adapters.layer import ExpertsLayer, Layer, ModuleLayer, is_experts, is_linear_like
from earnest.adapters.linalg import gathered
from earnest.adapters.variant import Spec, Tensors, Variant
from earnest.models.written import FEW, state_key

SLOTS = "earnest_slots"
KEPT = 16
"""The most derived values that a layer keeps."""


class AdapterGate:
    """The switch that all slots of one adapter share."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.rows: Tensor | None = None  # indices of the batch rows that this adapter acts on; None: all
        self.batch = 0  # size of the batch that `rows` indexes


class Slot(nn.Module):
    """One adapter's tensors on one layer."""

    def __init__(
        self, variant: Variant, layer: Layer, gate: AdapterGate, tensors: Tensors, shared: bool = False
    ) -> None:
        """``shared``: the tensors are another slot's parameters, of which this slot holds no copy."""
        super().__init__()
        self.variant, self.layer, self.gate = variant, layer, gate
        self.specs: dict[str, Spec] = {n: s for n, s in variant.specs(layer).items() if n in tensors}
        for name, spec in self.specs.items():
            if shared:
                self.register_parameter(name, tensors[name])  # type: ignore[arg-type]
                continue
            value = tensors[name].detach().to(layer.device, spec.dtype(layer))
            value = value.clone(memory_format=torch.contiguous_format)  # equal strides: a reload is bit-equal
            if spec.trainable:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value)
        self._cached: tuple[Any, Factors, tuple[Tensor, ...]] | None = None  # with its tensors: ids are not reused
        self.adapter_name = ""
        self.of_experts = isinstance(layer, ExpertsLayer) and not variant.uses("replace")
        self.replaces = variant.uses("replace") or self.of_experts
        plain = not self.of_experts
        self.has_before, self.has_after = plain and variant.uses("before"), plain and variant.uses("after")
        self.has_factors = plain and variant.uses("factors")
        self.stacks = tuple(layer.stacks()) if isinstance(layer, ExpertsLayer) and self.of_experts else ()
        self.changes = frozenset(self.stacks) or frozenset(self.specs)
        """The parameters of the module that a slot with ``replaces`` changes."""
        self.average: Mapping[str, Tensor] | None = None  # offsets that replace the trained ones, at any scale

    @property
    def tensors(self) -> dict[str, Tensor]:
        # Read at every call: functional_call and .to() replace the entries.
        return {**self._parameters, **self._buffers}  # type: ignore[dict-item]

    def whole(self) -> dict[str, Tensor]:
        """The tensors, gathered if they are in shards, without a graph."""
        return {name: gathered(t.detach()) for name, t in self.tensors.items()}

    def trainable(self) -> dict[str, Tensor]:
        """The tensors that training changes, also while the adapter is frozen."""
        t = self.tensors
        return {n: t[n] for n, spec in self.specs.items() if spec.trainable}

    def named(self, names: Iterable[str]) -> list[str]:
        """The slot's tensors that a variant calls ``names``: those of every parameter of experts."""
        if not self.of_experts:
            return list(names)
        return [f"{name}_{own}" for name in self.stacks for own in names]

    def factors(self) -> Factors | Around:
        """The variant's factors. Without a gradient they are cached until a parameter changes."""
        t, scale, layer = self.tensors, self.gate.scale, self.layer
        if self.variant.cheap:
            return self.variant.factors(t, layer, scale)
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or _in_transform(t):
            with _exactly(layer):
                return self.variant.factors(t, layer, scale)
        key = (scale, layer.dtype, state_key(self.trainable()), state_key(self._buffers, FEW))  # type: ignore[arg-type]
        found = self._cached
        if found is None or found[0] != key:
            with _exactly(layer):
                found = (key, self.variant.factors(t, layer, scale).plain().cast(layer.dtype), tuple(t.values()))
            self._cached = found
        return found[1]

    def run_before(self, x: Tensor) -> Tensor:
        return self.variant.before(self.tensors, x, self.layer, self.gate.scale)

    def run_after(self, y: Tensor, x: Tensor) -> Tensor:
        if self.has_factors:
            factors, split = self.factors(), self.layer.split
            y = low_rank(y, x, factors if split is None else split.factors(factors))
        return self.variant.after(self.tensors, y, self.layer, self.gate.scale) if self.has_after else y

    def acts(self) -> bool:
        """Whether a parameter that this slot replaces differs from the base's."""
        if self.gate.rows is not None and self.gate.scale != 0.0:
            raise AdapterError(
                f"{self.layer.name}: {self.variant.name} replaces the weights for the whole batch, so rows() cannot "
                "use it for single rows; run these rows as a batch of their own"
            )
        return self.gate.scale != 0.0 or self.average is not None

    def replaced(self, name: str, value: Tensor) -> Tensor:
        """A parameter of the module (fp32) with this slot's change."""
        if self.of_experts:
            return self.variant.experts(self.tensors, name, value, self.gate.scale)
        if self.average is not None:
            return self.variant.replace(self.average, name, value, 1.0)
        return self.variant.replace(self.tensors, name, value, self.gate.scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Slot:
        """`model.to(dtype)` moves the slot to the device and keeps fp32: rounded parameters would lose small
        updates."""
        self._cached = None

        def keep_dtype(x: Tensor) -> Tensor:
            probe = fn(torch.empty(0, dtype=x.dtype, device=x.device))
            return fn(x) if probe.dtype == x.dtype else x.to(probe.device)

        super()._apply(keep_dtype, recurse)
        self.layer.device = next(iter(self.tensors.values())).device
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Write nothing: `model.state_dict()` is the base's; `adapter.state_dict()` has the adapter."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Read nothing, for the same reason."""


def cached(layer: Layer, what: str, tensors: Tensors, extra: Any, compute: Callable[[], Tensor]) -> Tensor:
    """compute(), cached on the layer until one of the tensors changes. No cache while compiling or under torch.func."""
    if torch.compiler.is_compiling() or _in_transform(tensors):
        with _exactly(layer):
            return compute()
    place = (what, tuple(id(t) for t in tensors.values()))
    key = (extra, layer.dtype, state_key(tensors))
    found = layer.cache.get(place)
    if found is None or found[0] != key:
        if len(layer.cache) >= KEPT:  # entries for tensors that were passed to one call only
            layer.cache.clear()
        with _exactly(layer):
            found = layer.cache[place] = (key, compute(), tuple(tensors.values()))
    return found[1]


def _in_transform(tensors: Tensors) -> bool:
    """Whether torch.func wraps them, or they are fake: such tensors have no address and no bytes to compare."""
    return any(
        torch._C._functorch.is_functorch_wrapped_tensor(t) or isinstance(t, FakeTensor) for t in tensors.values()
    )


def _exactly(layer: Layer) -> Any:
    """Switch autocast off for derived values: the cache may outlive the autocast block."""
    kind = layer.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def slots_of(module: nn.Module) -> list[Slot]:
    """The slots on a layer, in the order of attachment."""
    holder = module._modules.get(SLOTS)
    return list(holder) if isinstance(holder, nn.ModuleList) else []  # type: ignore[arg-type]


def replaced(slots: Sequence[Slot], name: str, base: nn.Parameter) -> Tensor:
    """A base parameter with the changes of these slots: added in fp32 (or wider, if the base is), rounded once."""
    live = [s for s in slots if s.replaces and name in s.changes and s.acts()]
    if not live:
        return base
    value: Tensor = base.to(torch.promote_types(base.dtype, torch.float32))
    for slot in live:
        value = slot.replaced(name, value)
    return value.to(base.dtype)


def _on_rows(x: Tensor, gate: AdapterGate, layer: Layer) -> Tensor:
    if x.dim() < 3 or x.shape[0] != gate.batch:
        raise AdapterError(
            f"{layer.name}: rows() was given {gate.batch} rows and the layer's input has shape {tuple(x.shape)}; "
            "it needs [rows, positions, width] with as many rows (a layer that flattens its batch cannot mix them)"
        )
    assert gate.rows is not None
    return x.index_select(0, gate.rows.to(x.device))


def run_slots(layer: Layer, slots: list[Slot], x: Tensor, rest: tuple[Any, ...], more: Mapping[str, Any]) -> Tensor:
    """f_k(x) = after_k(f_{k−1}(before_k(x)) + ΔW_k x) for the slots whose gate is not 0."""
    slots = [s for s in slots if not s.replaces]  # those act where the base reads its parameters
    if len(slots) == 1 and slots[0].gate.rows is None and slots[0].gate.scale != 0.0:  # fast for the usual case
        slot = slots[0]
        return slot.run_after(layer.base(slot.run_before(x) if slot.has_before else x, *rest, **more), x)
    live = [s for s in slots if s.gate.scale != 0.0]
    inputs = []
    for slot in reversed(live):
        inputs.append(x)
        if slot.has_before:
            if slot.gate.rows is None:
                x = slot.run_before(x)
            else:
                x = x.index_copy(0, slot.gate.rows.to(x.device), slot.run_before(_on_rows(x, slot.gate, layer)))
    y = layer.base(x, *rest, **more)
    for slot in live:
        x = inputs.pop()
        if slot.gate.rows is None:
            y = slot.run_after(y, x)
        elif slot.has_factors or slot.has_after:
            part = slot.run_after(_on_rows(y, slot.gate, layer), _on_rows(x, slot.gate, layer))
            y = y.index_copy(0, slot.gate.rows.to(y.device), part)
    return y


class Adapted:
    """Mixin that gives a linear module its adapted forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        holder = self._modules[SLOTS]  # type: ignore[attr-defined]
        slots = holder._modules.values()
        layer = holder.layer
        if layer.stash is not None:
            if torch.is_grad_enabled():
                raise AdapterError(
                    f"{layer.name} is merged, so the adapter gets no gradient; use torch.no_grad(), or train unmerged"
                )
            return layer.base(*args, **kwargs)
        if not args:
            key = next(iter(kwargs))  # layer(input=x)
            args = (kwargs.pop(key),)
        return run_slots(layer, list(slots), args[0], args[1:], kwargs)


_CLASSES: dict[tuple[type[nn.Module], bool, tuple[str, ...]], type[nn.Module]] = {}


def _parameter(name: str) -> Any:
    def read(self: nn.Module) -> Tensor:
        base, holder = self._parameters[name], self._modules[SLOTS]
        assert base is not None and isinstance(holder, Holder)
        return base if holder.layer.stash is not None else replaced(slots_of(self), name, base)

    return property(read)


def _set_class(layer: Layer, slots: Sequence[Slot]) -> None:
    """Give the module the subclass that its slots need: another forward, properties for parameters, or both."""
    names = tuple(sorted({name for s in slots if s.replaces for name in s.changes}))
    forward = not all(s.replaces for s in slots)
    key = (layer.base_class, forward, names)
    if key not in _CLASSES:
        bases = (Adapted, layer.base_class) if forward else (layer.base_class,)
        body = {"__module__": layer.base_class.__module__, **{name: _parameter(name) for name in names}}
        _CLASSES[key] = type(f"Adapted{layer.base_class.__name__}", bases, body)
    layer.module.__class__ = _CLASSES[key]


def set_base_class(module: nn.Module, base: type[nn.Module]) -> None:
    """Give a module another class of its own; its adapters stay."""
    holder = module._modules.get(SLOTS)
    if isinstance(holder, Holder):
        holder.layer.base_class = base
        _set_class(holder.layer, slots_of(module))
    else:
        module.__class__ = base


class Holder(nn.ModuleList):
    """The child module that carries a layer's slots."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer


def layer_of(name: str, module: nn.Module) -> Layer:
    """The module's Layer: the existing one if the module is already adapted."""
    holder = module._modules.get(SLOTS)
    if isinstance(holder, Holder):
        return holder.layer
    if is_linear_like(module):
        return Layer(name, module)
    return ExpertsLayer(name, module) if is_experts(module) else ModuleLayer(name, module)


def install(slot: Slot) -> None:
    """Put a slot on its layer's module."""
    module = slot.layer.module
    holder = module._modules.get(SLOTS)
    if holder is None:
        holder = Holder(slot.layer)
        module.add_module(SLOTS, holder)
    assert isinstance(holder, Holder)
    holder.append(slot)
    _set_class(slot.layer, slots_of(module))


def uninstall(slot: Slot) -> None:
    """Remove a slot; after the last one the module has its own class again."""
    module = slot.layer.module
    slot.layer.cache.clear()
    rest = [s for s in slots_of(module) if s is not slot]
    del module._modules[SLOTS]
    if rest:
        holder = Holder(slot.layer)
        holder.extend(rest)
        module.add_module(SLOTS, holder)
        _set_class(slot.layer, rest)
    else:
        module.__class__ = slot.layer.base_class
