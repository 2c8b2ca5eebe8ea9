"""``Erase`` and ``Route``: guards that remove unwanted directions from every update.

At the update (default); θ is the trained parameter and u the step of the optimizer:

    Erase   θ ← θ + removed(-u)
    Route   θ is not changed; quarantine ← quarantine - removed(-u);  main = θ - quarantine, formed by ``ablated()``

so θ under Route equals the unguarded run bit for bit, with momentum, preconditioner, clipping and decay. At the
gradient (as published) the gradient is split before the optimizer, and Route updates main and quarantine with one
optimizer each. There AdamW reintroduces the unwanted component into the step of main. Every step reports both leaks.

If each rank holds some rows of a parameter, it also holds its rows of the quarantine and its columns of V. Coordinates
V w and squared lengths are summed over the ranks, so the guard removes what it removes in one process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from earnest.adapters.linalg import is_sharded
from earnest.engines.trained import as_shard, part_of, sum_of_parts
from earnest.errors import nearest
from earnest.guards.directions import Directions, by_owner
from earnest.guards.errors import GuardError, GuardWarning
from earnest.guards.gates import At, Gate, Rule
from earnest.guards.quarantine_optimizer import QuarantineOptimizer

if TYPE_CHECKING:
    from earnest.adapters import Adapter


class DirectionGuard:
    """Base of Erase and Route: directions, a rule, the leaks, refreshing, the state.

    ``every`` and ``extract``: after every N updates the directions are extracted again with the quarantine off. The new
    ones are adopted unless their overlap with the old ones is below ``min_overlap`` or their heading is opposite.
    """

    quarantines = False

    def __init__(
        self,
        directions: Directions,
        *,
        gate: Gate = Rule.gate,
        overshoot: float = Rule.overshoot,
        preserve: bool = Rule.preserve,
        at: At = Rule.at,
        every: int = Rule.every,
        extract: Callable[[], Directions] | None = None,
        min_overlap: float = Rule.min_overlap,
    ) -> None:
        self.rule = Rule(gate, overshoot, preserve, at, every, min_overlap)
        if (every > 0) != (extract is not None):
            raise GuardError(
                f"every={every}: refreshing needs every ≥ 1 and extract=, a function that returns directions."
            )
        self.directions, self.at, self.extract = directions, at, extract
        self.updates = 0
        self.quarantine: dict[str, Tensor] = {}
        self._held: Mapping[str, Tensor] = {}  # the adapter's parameters, whole or in shards
        self._parameters: Mapping[str, torch.nn.Parameter] = {}  # what this rank updates of them
        self._parts: Mapping[str, torch.nn.Parameter] | None = None
        self._bases: dict[str, Tensor] = {}
        self._second: QuarantineOptimizer | None = None
        self._start: dict[str, Tensor] = {}
        self._leak_gradient = self._removed = 0.0
        self._inside = False

    def set_parts(self, parts: Mapping[str, torch.nn.Parameter]) -> None:
        """Called before ``bind`` if each rank updates some rows of the parameters: these."""
        self._parts = parts

    def bind(self, adapter: Adapter, optimizer: torch.optim.Optimizer) -> None:
        """Bind the guard to an adapter and an optimizer; ΔW must be linear in the trained tensors."""
        variant = adapter.variant
        if not variant.linear():
            raise GuardError(
                f"adapter {variant.name!r}: ΔW is not linear in the trained tensors ({variant.linear_note()}), so "
                "removing a part of a parameter does not remove it from ΔW. "
                "Use AntiPaSTO(rank=None, block=0, gain='delta'), LoRA(freeze_a=True), VeRA(freeze_d=True) or IA3."
            )
        if self._parameters:
            raise GuardError("this guard already has an engine; make a new guard for another engine.")
        self._held = named = adapter.named_parameters()
        self._parameters = named if self._parts is None else self._parts
        self._check(self.directions)
        self._cast()
        # For every parameter, also without directions: refreshed directions may be in other modules.
        self.quarantine = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in self._guarded().items()}
        if self.at == "gradient" and self.quarantines:
            mirror = {self._parameters[n]: q for n, q in self.quarantine.items()}
            self._second = QuarantineOptimizer(
                optimizer, mirror, {id(q): self._held[n] for n, q in self.quarantine.items()}
            )

    @torch.no_grad()
    def prepare(self, names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> None:
        """Called between clipping and the optimizer: measure the gradient, and split it if at="gradient"."""
        if self._inside:
            raise GuardError("inside ablated() the parameters are not the trained ones; update outside of it.")
        unwanted = length = taken = whole = 0.0
        for name, p in zip(names, parameters, strict=True):
            if p.grad is None:
                continue
            g, total = p.grad.detach().flatten().double(), self._total(name)
            whole += _square(g, total)
            if (V := self._bases.get(name)) is not None:
                if self.at == "gradient":
                    removed = self.rule.removed(g, V, total)
                    g = g - removed
                    taken += _square(removed, total)
                    p.grad.copy_(g.view_as(p))
                    if self._second is not None:
                        self._second.set_gradient(self.quarantine[name], removed.view_as(p))
                unwanted += float(self.rule.unwanted(g, V, total).square().sum())
            length += _square(g, total)
        self._leak_gradient = _share(unwanted, length)
        self._removed = _share(taken, whole)
        self._start = {}
        if self._second is not None:
            for name, p in self._guarded().items():
                p.copy_(p.double() - self.quarantine[name].double())
                self._start[name] = p.detach().clone()

    @torch.no_grad()
    def judge(
        self, names: Sequence[str], before: Sequence[Tensor], parameters: Sequence[torch.nn.Parameter]
    ) -> Mapping[str, float]:
        """Called after the optimizer: remove the unwanted part from θ (Erase) or add it to the quarantine (Route)."""
        taken = unwanted = kept_length = length = 0.0
        for name, p, old in zip(names, parameters, before, strict=True):
            step = -(p.detach().double() - self._start.get(name, old).double()).flatten()
            total = self._total(name)
            length += _square(step, total)
            if (V := self._bases.get(name)) is not None:
                if self.at == "update":
                    removed = self.take(name, step, V)
                    taken += _square(removed, total)
                    self.put(name, p, removed.view_as(p))
                    step = step - removed
                unwanted += float(self.rule.unwanted(step, V, total).square().sum())
            kept_length += _square(step, total)
        if self._second is not None:
            self._second.step()
            for name, p in self._guarded().items():
                p.copy_(p.double() + self.quarantine[name].double())
        self.updates += 1
        report = {
            "removed": _share(taken, length) if self.at == "update" else self._removed,
            "leak_gradient": self._leak_gradient,
            "leak_update": _share(unwanted, kept_length),
        }
        if self.quarantines:
            squares = [_square(q.double(), self._total(name)) for name, q in self.quarantine.items()]
            report["quarantine"] = sum(squares) ** 0.5
        if self.rule.every and self.updates % self.rule.every == 0:
            assert self.extract is not None
            report |= self.refresh(self.extract)
        return report

    def take(self, name: str, step: Tensor, V: Tensor) -> Tensor:
        """The part of this module's descent direction that is removed."""
        return self.rule.removed(step, V, self._total(name))

    def put(self, name: str, p: torch.nn.Parameter, removed: Tensor) -> None:
        """Apply the removal to the parameter or the quarantine."""
        p.copy_(p.double() + removed)

    @contextmanager
    def ablated(self) -> Iterator[None]:
        """Inside the block the parameters are main = total - quarantine; afterwards the total again, bit for bit."""
        if not self._parameters:
            raise GuardError("this guard has no engine yet; give it to one: LocalEngine(…, guard=guard).")
        if self._inside:
            raise GuardError("ablated() inside ablated(): the quarantine is already off; leave the outer block first.")
        held = {n: p.detach().clone() for n, p in self._guarded().items()}
        self._inside = True
        try:
            with torch.no_grad():
                for name, p in self._guarded().items():
                    p.copy_(p.double() - self.quarantine[name].double())
            yield
        finally:
            self._inside = False
            with torch.no_grad():
                for name, p in self._guarded().items():
                    p.copy_(held[name])

    def refresh(self, extract: Callable[[], Directions]) -> dict[str, float]:
        """Extract directions with the quarantine off. Adopt them if they agree with the old ones; otherwise warn."""
        with self.ablated():
            fresh = extract()
        self._check(fresh)
        overlap, heading = self.directions.overlap(fresh), self.directions.heading(fresh)
        adopted = overlap >= self.rule.min_overlap and heading > 0
        if adopted:
            self.directions = fresh
            self._cast()
        else:
            warnings.warn(
                f"after update {self.updates} the new directions disagree with the old ones (overlap {overlap:.2f}, "
                f"needed {self.rule.min_overlap:g}; heading {heading:+.2f}, needed above 0); the old ones stay.",
                GuardWarning,
                stacklevel=2,
            )
        return {"overlap": overlap, "heading": heading, "adopted": float(adopted)}

    def state_dict(self) -> dict[str, Tensor]:
        """The current directions, the quarantine, the number of updates, and the second optimizer's state."""
        state = {f"directions.{k}": v.detach().clone() for k, v in self.directions.tensors().items()}
        for name, q in self.quarantine.items():
            held, copy = self._held[name], q.detach().clone()
            state[f"quarantine.{name}"] = as_shard(copy, held) if is_sharded(held) else copy
        state["updates"] = torch.tensor(self.updates)
        return state | ({f"twin.{k}": v for k, v in self._second.state_dict().items()} if self._second else {})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state. A state of other parameters is refused; then nothing is loaded."""
        # "twin" is the key of the second optimizer in checkpoints.
        parts = by_owner(state, ("directions", "quarantine", "twin", "updates"), "a guard's state")
        if not parts["updates"]:
            raise GuardError("this is not a guard's state; resume with the guard of the first run.")
        directions = Directions.from_tensors(parts["directions"], self.directions.source, self.directions.facts)
        self._check(directions)
        shapes = {n: t.shape for n, t in parts["quarantine"].items()}
        if shapes != {n: self._held[n].shape for n in self.quarantine}:
            odd = sorted(set(shapes) ^ set(self.quarantine)) or sorted(shapes)
            raise GuardError(
                f"the guard's state has other quarantines than this one (such as {odd[0]}); use the same guard."
            )
        if (self._second is None) and parts["twin"]:
            raise GuardError(
                f"this state belongs to a guard with at='gradient', this one has at={self.at!r}; use the same."
            )
        self.directions = directions
        self.updates = int(parts["updates"][""])
        self._cast()
        for name, value in parts["quarantine"].items():
            self.quarantine[name].copy_(part_of(value, self._held[name]))
        if self._second is not None:
            self._second.load_state_dict(parts["twin"])

    def _total(self, name: str) -> Callable[[Tensor], Tensor]:
        """The sum over the ranks that hold parts of this parameter."""
        return partial(sum_of_parts, like=self._held[name])

    def _guarded(self) -> Mapping[str, torch.nn.Parameter]:
        """Parameters with a quarantine, in the adapter's order: all of them, or none."""
        return self._parameters if self.quarantines else {}

    def _cast(self) -> None:
        self._bases = {}
        for name, V in self.directions.basis.items():
            held, k = self._held[name], len(V)
            columns = part_of(V.t().reshape(*held.shape, k), held).reshape(-1, k).t() if is_sharded(held) else V
            self._bases[name] = columns.to(held.device, torch.float64)

    def _check(self, directions: Directions) -> None:
        for name, V in directions.basis.items():
            if name not in self._held:
                raise GuardError(
                    f"the directions have a module {name}, which is not a parameter of this adapter: "
                    f"{nearest(name, self._held)} Extract them on this adapter."
                )
            if V.shape[1] != (size := self._held[name].numel()):
                raise GuardError(f"{name}: the directions have {V.shape[1]} numbers, the parameter has {size}.")

    def describe(self) -> str:
        rule = f"{self.rule.gate}, overshoot {self.rule.overshoot:g}" + (", length kept" if self.rule.preserve else "")
        return f"{type(self).__name__} at the {self.at} ({rule}): {self.directions.describe()}"


def _square(x: Tensor, total: Callable[[Tensor], Tensor]) -> float:
    """The squared length of a tensor of which each rank may have a part."""
    return float(total(x.square().sum()))


def _share(part: float, whole: float) -> float:
    """The ratio of two norms, from their squares; 0 if the second is 0."""
    return (part / whole) ** 0.5 if whole else 0.0


class Erase(DirectionGuard):
    """Remove the unwanted part of every update."""


class Route(DirectionGuard):
    """Put the unwanted part of every update into a quarantine, which ``ablated()`` subtracts."""

    quarantines = True

    def put(self, name: str, p: torch.nn.Parameter, removed: Tensor) -> None:
        q = self.quarantine[name]
        q.copy_(q.double() - removed)
