"""``Erase`` and ``Route``: what of every update may not be learned.

At the update (default), where the optimizer owns one parameter θ, the total, and u is the step that it took:

    Erase   θ ← θ + removed(-u)
    Route   θ stays; quarantine ← quarantine - removed(-u);  main = θ - quarantine, formed by ``ablated()``

so Route trains the unguarded run bit for bit, momentum, preconditioner, clipping and decay included. At the gradient,
as published, it is split before the optimizer, and Route steps main and quarantine with an optimizer each: there
AdamW puts the unwanted component back into the step of main. Both leaks are reported at every step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from earnest.errors import nearest
from earnest.guards.directions import Directions
from earnest.guards.errors import GuardError, GuardWarning
from earnest.guards.gates import At, Gate, Rule
from earnest.guards.quarantine_optimizer import QuarantineOptimizer

if TYPE_CHECKING:
    from earnest.adapters import Adapter


class DirectionGuard:
    """What Erase and Route share: directions, a rule, the leaks, refreshing, the state.

    ``every`` and ``extract``: after every so many updates the directions are extracted anew with the quarantine off,
    and adopted unless they turned away: an overlap with the old ones below ``min_overlap``, or the opposite heading.
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
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._bases: dict[str, Tensor] = {}
        self._second: QuarantineOptimizer | None = None
        self._start: dict[str, Tensor] = {}
        self._leak_gradient = self._removed = 0.0
        self._inside = False

    # --- the engine's side --------------------------------------------------------------------------------------------

    def bind(self, adapter: Adapter, optimizer: torch.optim.Optimizer) -> None:
        """Meet the adapter and the optimizer; refuse an adapter whose ΔW is not linear in what it trains."""
        variant = adapter.variant
        if not variant.linear():
            raise GuardError(
                f"adapter {variant.name!r}: ΔW is not linear in what it trains ({variant.linear_note()}), so what is "
                "taken out of a parameter is not taken out of ΔW. Use AntiPaSTO(rank=None, block=0, gain='delta'), "
                "LoRA(freeze_a=True), VeRA(freeze_d=True) or IA3."
            )
        if self._parameters:
            raise GuardError("this guard has an engine already; make a new one for another.")
        self._parameters = adapter.named_parameters()
        self._check(self.directions)
        self._cast()
        # For every parameter, with directions or not: a refreshed basis may enter others.
        self.quarantine = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in self._guarded().items()}
        if self.at == "gradient" and self.quarantines:
            self._second = QuarantineOptimizer(optimizer, {self._parameters[n]: q for n, q in self.quarantine.items()})

    @torch.no_grad()
    def prepare(self, names: Sequence[str], parameters: Sequence[torch.nn.Parameter]) -> None:
        """Between clipping and the optimizer: measure the gradient, and split it where that is the level."""
        if self._inside:
            raise GuardError("inside ablated() the parameters are not the trained ones; update outside of it.")
        unwanted = length = taken = whole = 0.0
        for name, p in zip(names, parameters, strict=True):
            if p.grad is None:
                continue
            g = p.grad.detach().flatten().double()
            whole += float(g.square().sum())
            if (V := self._bases.get(name)) is not None:
                if self.at == "gradient":
                    removed = self.rule.removed(g, V)
                    g = g - removed
                    taken += float(removed.square().sum())
                    p.grad.copy_(g.view_as(p))
                    if self._second is not None:
                        self._second.set_gradient(self.quarantine[name], removed.view_as(p))
                unwanted += float(self.rule.unwanted(g, V).square().sum())
            length += float(g.square().sum())
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
        """Look at the step; take the unwanted part out of θ (Erase) or into the quarantine (Route)."""
        taken = unwanted = kept_length = length = 0.0
        for name, p, old in zip(names, parameters, before, strict=True):
            step = -(p.detach().double() - self._start.get(name, old).double()).flatten()
            length += float(step.square().sum())
            if (V := self._bases.get(name)) is not None:
                if self.at == "update":
                    removed = self.take(name, step, V)
                    taken += float(removed.square().sum())
                    self.put(name, p, removed.view_as(p))
                    step = step - removed
                unwanted += float(self.rule.unwanted(step, V).square().sum())
            kept_length += float(step.square().sum())
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
            report["quarantine"] = sum(float(q.double().square().sum()) for q in self.quarantine.values()) ** 0.5
        if self.rule.every and self.updates % self.rule.every == 0:
            assert self.extract is not None
            report |= self.refresh(self.extract)
        return report

    def take(self, name: str, step: Tensor, V: Tensor) -> Tensor:
        """What goes out of this module's descent direction."""
        return self.rule.removed(step, V)

    def put(self, name: str, p: torch.nn.Parameter, removed: Tensor) -> None:
        """Where it goes."""
        p.copy_(p.double() + removed)

    # --- the policy that would be deployed ----------------------------------------------------------------------------

    @contextmanager
    def ablated(self) -> Iterator[None]:
        """main = total - quarantine inside the block, and the bits of the total again behind it."""
        if not self._parameters:
            raise GuardError("this guard has no engine yet; give it to one: LocalEngine(…, guard=guard).")
        if self._inside:
            raise GuardError("ablated() inside ablated(): the quarantine is off already.")
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

    # --- refreshing ---------------------------------------------------------------------------------------------------

    def refresh(self, extract: Callable[[], Directions]) -> dict[str, float]:
        """Extract with the quarantine off; adopt what still points where the old basis did, warn of what does not."""
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
                f"after update {self.updates} the extracted directions turned away (overlap {overlap:.2f}, needed "
                f"{self.rule.min_overlap:g}; heading {heading:+.2f}, needed above 0): the old ones stay.",
                GuardWarning,
                stacklevel=2,
            )
        return {"overlap": overlap, "heading": heading, "adopted": float(adopted)}

    # --- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """The directions in force, the quarantine, the count of updates, and the second optimizer's state."""
        state = {f"directions.{k}": v.detach().clone() for k, v in self.directions.tensors().items()}
        state |= {f"quarantine.{k}": v.detach().clone() for k, v in self.quarantine.items()}
        state["updates"] = torch.tensor(self.updates)
        return state | ({f"twin.{k}": v for k, v in self._second.state_dict().items()} if self._second else {})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Strict: a state of other parameters is refused, and then nothing is loaded."""
        # "twin" is the key of the second optimizer in checkpoints.
        parts: dict[str, dict[str, Tensor]] = {"directions": {}, "quarantine": {}, "twin": {}, "updates": {}}
        for key, value in state.items():
            owner, _, name = key.partition(".")
            if owner not in parts:
                raise GuardError(f"{key!r} is no part of a guard's state; it has {', '.join(parts)}.")
            parts[owner][name] = value
        if not parts["updates"]:
            raise GuardError("there is no guard's state here; resume with the guard that the run began with.")
        directions = Directions.from_tensors(parts["directions"], self.directions.source, self.directions.facts)
        self._check(directions)
        shapes = {n: t.shape for n, t in parts["quarantine"].items()}
        if shapes != {n: t.shape for n, t in self.quarantine.items()}:
            odd = sorted(set(shapes) ^ set(self.quarantine)) or sorted(shapes)
            raise GuardError(
                f"the guard's state has other quarantines than this one (such as {odd[0]}); use the same guard."
            )
        if (self._second is None) and parts["twin"]:
            raise GuardError(f"this state is of a guard at the gradient, this one is at={self.at!r}; use the same.")
        self.directions = directions
        self.updates = int(parts["updates"][""])
        self._cast()
        for name, value in parts["quarantine"].items():
            self.quarantine[name].copy_(value)
        if self._second is not None:
            self._second.load_state_dict(parts["twin"])

    def _guarded(self) -> dict[str, torch.nn.Parameter]:
        """Parameters with a quarantine, in the adapter's order: all of them, or none."""
        return self._parameters if self.quarantines else {}

    def _cast(self) -> None:
        self._bases = {n: V.to(self._parameters[n].device, torch.float64) for n, V in self.directions.basis.items()}

    def _check(self, directions: Directions) -> None:
        for name, V in directions.basis.items():
            if name not in self._parameters:
                raise GuardError(
                    f"the directions have a module {name}, which is no parameter of this adapter: "
                    f"{nearest(name, self._parameters)} Extract them on this adapter."
                )
            if V.shape[1] != (size := self._parameters[name].numel()):
                raise GuardError(f"{name}: the directions have {V.shape[1]} numbers, the parameter has {size}.")

    def describe(self) -> str:
        """One line for people."""
        rule = f"{self.rule.gate}, overshoot {self.rule.overshoot:g}" + (", length kept" if self.rule.preserve else "")
        return f"{type(self).__name__} at the {self.at} ({rule}): {self.directions.describe()}"


def _share(part: float, whole: float) -> float:
    """The ratio of two norms, from their squares; 0 where there is nothing to share."""
    return (part / whole) ** 0.5 if whole else 0.0


class Erase(DirectionGuard):
    """The unwanted part of every update is gone."""


class Route(DirectionGuard):
    """The unwanted part of every update is set aside in a quarantine, which ``ablated()`` leaves out."""

    quarantines = True

    def put(self, name: str, p: torch.nn.Parameter, removed: Tensor) -> None:
        q = self.quarantine[name]
        q.copy_(q.double() - removed)
