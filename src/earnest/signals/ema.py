"""A teacher with the moving average of the trained adapter's ΔW.

    Δ̄ ← (1-r)·Δ̄ + r·ΔW        after every update, for every adapted layer (and its bias, if the variant changes it)

For a module that is trained whole, Δ̄ is the average of its parameters' offsets.

The average is over ΔW, not over the factors: (EMA A)(EMA B) ≠ EMA(AB). It is dense if it fits the memory budget.
Otherwise a low-rank ΔW stays low-rank: it is compressed again after every update, and the lost part is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.errors import SignalError
from earnest.signals.batch import Batch
from earnest.signals.distributions import Distribution
from earnest.signals.scorer import Scorer, distribution

BUDGET_BYTES = 1 << 30


class EMATeacher:
    """Averages an adapter's ΔW after each update (it is an engine's ``outer`` hook) and scores with the average.

    ``rate`` is r: 0.05 averages over about 20 updates. ``rank`` is the rank of a compressed average; None: twice
    the rank of the adapter.
    """

    kind: ClassVar[str] = "ema"

    def __init__(
        self, adapter: Any, rate: float = 0.05, *, budget_bytes: int = BUDGET_BYTES, rank: int | None = None
    ) -> None:
        if not 0 < rate <= 1:
            raise SignalError(f"EMATeacher: rate must lie in 0…1 (1 is the live policy), got {rate!r}.")
        self.adapter, self.rate = adapter, rate
        slots = adapter.slots.values()
        if experts := [path for path, slot in adapter.slots.items() if slot.of_experts]:
            raise SignalError(
                f"EMATeacher: the average of ΔW has no form for the experts in {experts[0]}; use another teacher, or "
                "leave the experts out of the adapter's targets."
            )
        size = 4 * sum(slot.layer.m * slot.layer.n for slot in slots)
        self.dense = size <= budget_bytes
        if not self.dense and not all(_is_low_rank(slot) for slot in slots):
            raise SignalError(
                f"EMATeacher: the dense average of {adapter.variant.name} takes {size} bytes, the budget is "
                f"{budget_bytes}, "
                "and this variant has no low-rank form; raise the budget, adapt fewer layers, or use another teacher."
            )
        self.residual = 0.0
        with torch.no_grad():
            self.state: dict[str, Tensor] = {}
            for path, slot in adapter.slots.items():
                if self.dense:
                    self.state |= {f"{path}.{k}": v.clone() for k, v in _dense(slot).items()}
                else:
                    left, right = _factors(slot)
                    self.rank = rank or 2 * left.shape[1]
                    left, right = _padded(left, right, self.rank)
                    self.state |= {f"{path}.left": left, f"{path}.right": right}

    @property
    def form(self) -> str:
        return "dense" if self.dense else f"re-compressed to rank {self.rank}"

    @torch.no_grad()
    def after_update(self, engine: Any) -> Mapping[str, float]:
        """Update the average with the adapter's current ΔW."""
        worst = 0.0
        for path, slot in self.adapter.slots.items():
            if self.dense:
                for name, value in _dense(slot).items():
                    self.state[f"{path}.{name}"].lerp_(value, self.rate)
                continue
            left, right = _factors(slot)
            left = torch.cat([(1 - self.rate) * self.state[f"{path}.left"], self.rate * left], 1)
            right = torch.cat([self.state[f"{path}.right"], right], 0)
            self.state[f"{path}.left"], self.state[f"{path}.right"], lost = _compress(left, right, self.rank)
            worst = max(worst, lost)
        self.residual = worst
        return {"ema_rate": self.rate, "ema_residual": worst}

    def state_dict(self) -> dict[str, Tensor]:
        return {k: v.clone() for k, v in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if set(state) != set(self.state) or any(state[k].shape != v.shape for k, v in self.state.items()):
            raise SignalError(
                "the state does not fit this average: its layers or shapes differ; attach the same adapter."
            )
        for name, value in self.state.items():
            value.copy_(state[name])

    def teach(self, engine: Scorer, informed: Batch, own: Batch) -> tuple[Distribution, None]:
        with self.installed():
            return distribution(engine, informed, "previous"), None  # the gate is at 0; the hooks add the average

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the block every adapted layer adds its averaged ΔW·x (and Δb) to its output, and every module that is
        trained whole has its averaged parameters."""
        offsets = {
            id(tensor): self.state[f"{path}.{name}"]
            for path, slot in self.adapter.slots.items()
            if slot.replaces
            for name, tensor in slot.tensors.items()
        }
        with ExitStack() as stack:
            for path, slot in self.adapter.slots.items():
                if not slot.replaces:
                    stack.callback(slot.layer.module.register_forward_hook(self._hook(path, slot.layer.split)).remove)
            for slot in (*self.adapter.slots.values(), *self.adapter.mirrors):
                if slot.replaces:
                    slot.average = {name: offsets[id(tensor)] for name, tensor in slot.tensors.items()}
                    stack.callback(setattr, slot, "average", None)
            yield

    def _hook(self, path: str, split: Any) -> Any:
        def add(_: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
            x = args[0]
            if self.dense:
                weight = self.state[f"{path}.weight"].to(x.dtype)
                change = torch.nn.functional.linear(x, weight) if split is None else split.change(x, weight)
                bias = self.state.get(f"{path}.bias")
                return output + change + (0 if bias is None else bias.to(x.dtype))
            left, right = (self.state[f"{path}.{side}"].to(x.dtype) for side in ("left", "right"))
            return output + (x @ right.T @ left.T if split is None else split.change(x, left @ right))

        return add


def _is_low_rank(slot: Any) -> bool:
    """Whether ΔW is exactly the variant's factors."""
    return slot.has_factors and not slot.has_before and not slot.has_after and not slot.variant.uses("weight")


def _factors(slot: Any) -> tuple[Float[Tensor, "m k"], Float[Tensor, "k n"]]:
    """ΔW = left · right of one layer at gate 1, in float32."""
    factors = slot.variant.factors(slot.tensors, slot.layer, 1.0).plain()
    return (factors.scale * factors.left()).detach(), factors.A.float().detach()


def _dense(slot: Any) -> dict[str, Tensor]:
    """ΔW (and Δb, if there is one) of one layer at gate 1, in float32; of a module trained whole, its offsets."""
    if slot.replaces:
        return dict(slot.whole())
    if _is_low_rank(slot):
        left, right = _factors(slot)
        return {"weight": left @ right}
    w, b = slot.layer.weight(), slot.layer.bias
    b = None if b is None else b.detach().float()
    weight, bias = slot.variant.weight(slot.tensors, slot.layer, w, b, 1.0)
    found = {"weight": (weight - w).detach()}
    if bias is not None:
        found["bias"] = (bias if b is None else bias - b).detach()
    return found


def _padded(left: Tensor, right: Tensor, rank: int) -> tuple[Float[Tensor, "m k"], Float[Tensor, "k n"]]:
    """Factors of exactly this rank: padded with zeros, or without the smallest directions."""
    if left.shape[1] > rank:
        left, right, _ = _compress(left, right, rank)
        return left, right
    more = rank - left.shape[1]
    return torch.nn.functional.pad(left, (0, more)), torch.nn.functional.pad(right, (0, 0, 0, more))


def _compress(
    left: Float[Tensor, "m j"], right: Float[Tensor, "j n"], rank: int
) -> tuple[Float[Tensor, "m k"], Float[Tensor, "k n"], float]:
    """The best approximation of left·right of this rank, and the share of its norm that is lost."""
    q1, r1 = torch.linalg.qr(left)
    q2, r2 = torch.linalg.qr(right.T)
    u, s, vh = torch.linalg.svd(r1 @ r2.T)
    total = float(s.norm())
    lost = float(s[rank:].norm()) / total if total else 0.0
    kept_left, kept_right = q1 @ (u[:, :rank] * s[:rank]), vh[:rank] @ q2.T
    left, right = _padded(kept_left, kept_right, rank)
    return left, right, lost
