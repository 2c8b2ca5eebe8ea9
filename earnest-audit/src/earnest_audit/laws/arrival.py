"""How much of an update 16-bit parameters receive: a part of GL.

share = ⟨Δp, Δq⟩ / ⟨Δq, Δq⟩,  Δq being what the same optimizer does to a copy q of p in fp32

Optimizers with master weights, Kahan summation or stochastic rounding may apply an update later. So where little
changed, the same gradient is applied again and again; with plain rounding to nearest that changes nothing. No law's
gradient is needed for that, and the cost is optimizer steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit.gradient import Gradient
from earnest_audit.precision import is_coarse
from earnest_audit.probe import Probe
from earnest_audit.restore import held, seeded

SHARE = 0.5  # rounding to nearest that is fair overall keeps about all of an update
ENTRIES = 2**24  # at most N entries are followed, of parameters spread over the model
REPEATS = 256  # of the same gradient; fewer where they take long
LONG = 2**20


@dataclass
class Arrival:
    """``share`` of an fp32 update after ``steps``; None where the optimizer cannot be copied. ``moved`` did move in
    the end, in their own bits or in those of a master copy."""

    share: float | None = None
    steps: int = 0
    moved: set[str] = field(default_factory=set)
    masters: set[str] = field(default_factory=set)
    random: bool = False

    @property
    def arrives(self) -> bool:
        return self.random or self.share is None or self.share >= SHARE


def arrival(probe: Probe, gradient: Gradient, still: list[str]) -> Arrival | None:
    """None where nothing of 16 bits is trained by the optimizer."""
    optimizer = probe.step.optimizer
    if optimizer is None or not (handed := _handed(probe, optimizer, gradient, still)):
        return None
    with probe.training():
        after_warmup(optimizer)
        found = _follow(probe, optimizer, handed, still)
    if not found.arrives or any(n in handed and n not in found.moved for n in still):
        found.random = _random(probe, optimizer, handed)
    return found


def after_warmup(optimizer: torch.optim.Optimizer) -> None:
    """A schedule's first rates are 0, or almost: step as after them."""
    for group in optimizer.param_groups:
        planned = group.get("initial_lr")
        if planned and group.get("lr", planned) < planned:
            group["lr"] = planned


def _handed(probe: Probe, optimizer: torch.optim.Optimizer, gradient: Gradient, still: list[str]) -> dict[str, Tensor]:
    """The clipped gradient of what is followed: what stayed constant first, then parameters spread over the model."""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    live = {n: g for n, g in gradient.parts.items() if g is not None and bool((g != 0).any())}
    mine = [n for n in live if is_coarse(probe.parameters[n]) and id(probe.parameters[n]) in owned]
    factor = min(1.0, (probe.step.max_grad_norm or math.inf) / max(gradient.norm(), 1e-300))
    chosen: dict[str, Tensor] = {}
    room = ENTRIES
    spread = [n for stride in range(7) for n in mine[stride::7]]
    for name in dict.fromkeys([n for n in mine if n in set(still)] + spread):
        if not chosen or live[name].numel() <= room:
            chosen[name] = live[name] * factor
            room -= live[name].numel()
    return chosen


def _follow(probe: Probe, optimizer: torch.optim.Optimizer, handed: Mapping[str, Tensor], still: list[str]) -> Arrival:
    mine = {n: probe.parameters[n] for n in handed}
    start = {n: p.detach().clone() for n, p in mine.items()}
    found = Arrival()
    masters: dict[str, Tensor] = {}
    try:
        shadow, wide = _wide(optimizer, mine)
    except Exception:  # what cannot be copied cannot be compared; whether it moves can still be seen
        shadow, wide = None, {}
    longest = REPEATS if sum(map(Tensor.numel, start.values())) <= LONG else REPEATS // 8
    for number in range(1, longest + 1):
        _step(probe, optimizer, mine, handed)
        try:
            if shadow is not None:
                _step(probe, shadow, wide, handed)
        except Exception:
            shadow = None
        if number <= 2:  # a master copy rounds to its parameter, and moves
            before, masters = masters, _masters(optimizer, mine)
            found.masters = {n for n, m in masters.items() if n in before and not before[n].equal(m)}
        if number & (number - 1) == 0:  # 1, 2, 4, …
            found.steps = number
            found.moved = found.masters | {n for n, p in mine.items() if not p.detach().equal(start[n])}
            rest = {n: p for n, p in start.items() if n not in found.masters}
            found.share = None if shadow is None else _share(rest, mine, wide)
            if found.arrives and all(n in found.moved for n in still if n in mine):
                break
    return found


def _share(start: Mapping[str, Tensor], mine: Mapping[str, Tensor], wide: Mapping[str, Tensor]) -> float | None:
    if not start:
        return 1.0  # all of it is in master copies
    did, meant = (Gradient({n: t[n].detach().double() - p.double() for n, p in start.items()}) for t in (mine, wide))
    return did.best_scale(meant) if meant.norm() > 0 else None


def _wide(
    optimizer: torch.optim.Optimizer, mine: Mapping[str, nn.Parameter]
) -> tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]:
    """The same optimizer over fp32 copies of these parameters, the others being its own still."""
    wide = {n: nn.Parameter(p.detach().float().clone()) for n, p in mine.items()}
    memo: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    memo |= {id(mine[n]): q for n, q in wide.items()}
    shadow = object.__new__(type(optimizer))
    memo[id(optimizer)] = shadow
    # Schedules put a `step` on the object that is bound to the original.
    inside = {k: v for k, v in vars(optimizer).items() if k != "step"}
    vars(shadow).update(copy.deepcopy(inside, memo))
    for n, p in mine.items():
        state = shadow.state.get(wide[n], {})
        for key, value in state.items():
            if type(value) is Tensor and value.dtype == p.dtype and value.shape == p.shape:
                state[key] = value.float()
    return shadow, wide


def _step(
    probe: Probe, optimizer: torch.optim.Optimizer, mine: Mapping[str, nn.Parameter], handed: Mapping[str, Tensor]
) -> None:
    """One update in which only these parameters have a gradient."""
    for p in (*probe.parameters.values(), *(q for group in optimizer.param_groups for q in group["params"])):
        p.grad = None
    for n, g in handed.items():
        mine[n].grad = g.to(mine[n].dtype, copy=True)
    optimizer.step()


def _masters(optimizer: torch.optim.Optimizer, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that the optimizer keeps in more bits: tensors that round to the parameter."""
    wider = [t for t in held(optimizer) if t.is_floating_point() and not is_coarse(t)]
    found: dict[str, Tensor] = {}
    for n, p in mine.items():
        copies = [t for t in wider if t.shape == p.shape and t.device == p.device and t.to(p.dtype).equal(p.detach())]
        if copies:
            found[n] = copies[0].detach().clone()
    return found


def _random(probe: Probe, optimizer: torch.optim.Optimizer, handed: Mapping[str, Tensor]) -> bool:
    """Whether the same update from the same state differs between two seeds: stochastic rounding is fair, with time."""
    ends: list[list[Tensor]] = []
    for seed in (0, 1):
        with probe.training(), seeded(seed):
            after_warmup(optimizer)
            for _ in range(4):
                _step(probe, optimizer, probe.parameters, handed)
            ends.append([probe.parameters[n].detach().clone() for n in handed])
    return not all(a.equal(b) for a, b in zip(*ends, strict=True))
