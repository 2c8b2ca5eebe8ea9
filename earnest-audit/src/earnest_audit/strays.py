"""Find parameters that get a gradient and belong to no optimizer, among all modules, while a script runs.

If other parameters of the same module are trained, this is a failure: a parameter group was forgotten. A module without
any trained parameter may be frozen on purpose (a perceptual loss), so it is only reported.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from earnest_audit.activity import entries
from earnest_audit.laws.liveness import some
from earnest_audit.limits import ENOUGH
from earnest_audit.places import caller
from earnest_audit.verdict import Finding, LawOutcome


def modules() -> list[nn.Module]:
    """Every module that exists."""
    return [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]


@dataclass
class _Stray:
    name: str
    value: Tensor
    gradient: Tensor
    looks: int = 0  # new gradients in a row after which the parameter had not changed


class Strays:
    """Records parameters without an optimizer. Call ``begin`` at the first step of an optimizer, and ``look`` at each
    of its steps."""

    def __init__(self) -> None:
        self.owned = WeakIdKeyDictionary()
        self.strays = WeakIdKeyDictionary()
        self.partly: set[str] = set()
        self.place = ""  # where the first optimizer stepped

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        self.place = self.place or caller()
        for group in optimizer.param_groups:
            for p in group["params"]:
                self.owned[p] = True
        for module in sorted(modules(), key=lambda m: -sum(1 for _ in m.parameters())):
            named = {n: p for n, p in module.named_parameters() if p.requires_grad}
            trained = any(p in self.owned for p in named.values())
            for n, p in named.items():
                if p in self.owned or p.grad is None or p.layout != torch.strided:
                    continue
                if p not in self.strays:
                    self.strays[p] = _Stray(f"{type(module).__name__}.{n}", entries(p).clone(), entries(p.grad).clone())
                if trained:
                    self.partly.add(self.strays[p].name)

    def look(self) -> None:
        """Call before a step: counts new gradients. A parameter that has changed is trained elsewhere."""
        for p, stray in list(self.strays.items()):
            now = None if p.grad is None else entries(p.grad).clone()
            if now is None or torch.equal(now, stray.gradient):
                continue
            stray.gradient = now
            value = entries(p).clone()
            stray.looks = stray.looks + 1 if torch.equal(value, stray.value) else 0
            stray.value = value

    def findings(self) -> Iterator[Finding]:
        found = [s.name for p, s in self.strays.items() if p not in self.owned and s.looks >= ENOUGH]
        outcomes: tuple[LawOutcome, ...] = ("fails", "not declared")
        for outcome in outcomes:
            names = [n for n in found if (n in self.partly) == (outcome == "fails")]
            if names:
                yield Finding(
                    "GL", "parameters without an optimizer", f"{len(names)} get gradients and stay constant", "0",
                    outcome,
                    f"{some(names)} get a gradient in every update, and no optimizer has them. Add them to the "
                    "optimizer's parameters; where they are meant to stay, requires_grad_(False) freezes them.",
                    self.place,
                )  # fmt: skip
