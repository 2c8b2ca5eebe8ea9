"""An advantage estimator: fn(rewards [B], groups [B]) -> advantages [B].

shift     + a constant on all rewards of one group changes nothing
locality  a change in one group leaves the others alone
zero sum  Σ over a group is 0
scale     rewards × 2: the same (scale="free", divided by a std) or × 2 (scale="equal")
order     permuting the rows permutes the advantages
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from earnest.audit.law import Law
from earnest.audit.subjects.base import judged, rounding
from earnest.audit.verdict import Finding

SHIFT = 5.0
STABILISER = 1e-4  # the largest constant that public code adds to a standard deviation


@dataclass
class AdvantageEstimator:
    """``over`` is what it is centred over: "group", "batch", or "none" (then shift and sum do not apply)."""

    fn: Callable[[Tensor, Tensor], Tensor]
    scale: Literal["free", "equal"]
    over: Literal["group", "batch", "none"] = "group"
    groups: int = 3
    size: int = 4
    interleaved: bool = True
    seed: int = 0

    def check(self) -> Iterator[Finding]:
        rng = torch.Generator().manual_seed(self.seed)
        groups = torch.arange(self.groups).repeat_interleave(self.size)
        if (
            self.interleaved
        ):  # rows of a group need not stand together; an estimator that assumes it must not be told otherwise
            groups = groups[torch.randperm(len(groups), generator=rng)]
        rewards = torch.randn(len(groups), generator=rng)
        base = self._run(rewards, groups)
        room = _room(rewards, groups, self.over)
        scale = float(base.abs().max())
        yield judged(
            "GL",
            "advantages",
            f"largest {scale:.3g}",
            "not all 0",
            scale > 0,
            "Every advantage is 0: nothing will be learned.",
        )
        lonely = self.fn(torch.tensor([0.3, 1.7]), torch.tensor([0, 1]))
        if self.over == "group" and bool((lonely == 0).all()):
            yield Finding(
                "GL",
                "groups of one row",
                "advantages are 0",
                "-",
                "not applicable",
                "One sample a prompt teaches nothing here.",
            )
        first = groups == groups[0]
        if self.over == "group":
            shifted = self._run(rewards + SHIFT * first.float(), groups)
            yield self._same(
                "LAW",
                "shift of one group",
                base,
                shifted,
                (scale, room),
                "A constant on one prompt's rewards moves advantages: they are normalised across prompts, or the "
                "groups are cut wrongly (tiled against interleaved).",
            )
            other = self._run(torch.where(first, rewards * 3 - 1, rewards), groups)
            yield self._same(
                "LAW",
                "group locality",
                base[~first],
                other[~first],
                (scale, room),
                "Another prompt's rewards reach into this one's advantages.",
            )
            sums = max(abs(float(base[groups == g].sum())) for g in range(self.groups))
            yield judged(
                "LAW",
                "sum over a group",
                f"{sums:.2g}",
                f"0, up to {room * scale * self.size:.1g}",
                sums <= room * scale * self.size,
                "Advantages of a group do not cancel: the baseline is not the group's mean.",
            )
        elif self.over == "batch":
            yield self._same(
                "LAW",
                "shift of all rewards",
                base,
                self._run(rewards + SHIFT, groups),
                (scale, room),
                "A constant on all rewards moves the advantages: they are not centred.",
            )
        doubled = self._run(rewards * 2, groups)
        expected = base if self.scale == "free" else base * 2
        yield self._same(
            "LAW",
            f"scale ({self.scale})",
            expected,
            doubled,
            (scale, room),
            "Scaling the rewards does not do what the mode says: the division by the standard deviation is in the "
            "wrong mode.",
        )
        order = torch.randperm(len(groups), generator=rng)
        yield self._same(
            "SE",
            "permuted rows",
            base[order],
            self._run(rewards[order], groups[order]),
            (scale, room),
            "The order of the rows matters: a statistic is broadcast along the wrong axis, or groups are found by "
            "place.",
        )

    def _run(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return torch.as_tensor(self.fn(rewards.clone(), groups.clone())).detach().float().reshape(-1)

    @staticmethod
    def _same(code: str, subject: str, a: Tensor, b: Tensor, scale: tuple[float, float], meaning: str) -> Finding:
        """``scale``: what differences are relative to, and how large they may be."""
        off = float((a - b).abs().max()) / max(scale[0], 1e-12)
        return judged(code, subject, f"off by {off:.2g}", f"≤ {scale[1]:.1g}", off <= scale[1], meaning)


def _room(rewards: Tensor, groups: Tensor, over: str) -> float:
    """Rounding of the largest shifted reward over the smallest spread that a group (or the batch) divides by, and the
    usual constant in that division's denominator."""
    parts = [rewards[groups == g] for g in groups.unique()] if over == "group" else [rewards]
    spread = min((float(p.std()) for p in parts if len(p) > 1), default=1.0)
    return (rounding(rewards) * (float(rewards.abs().max()) + SHIFT) + STABILISER) / spread


LAW = Law(
    code="LAW",
    name="advantages (AdvantageEstimator)",
    sentence="A constant on a group's rewards changes nothing, groups do not see each other, a group sums to 0, "
    "scaling does what the mode says, order does not matter.",
    needs="fn(rewards, groups), scale, over",
    how="Rewards are shifted, scaled and permuted. The tolerance is rounding over the smallest spread, and the usual "
    "constant (up to 1e-4) in a denominator.",
    traps="Centring over the batch is no fault where it is declared; an estimator that takes rows by place declares "
    "interleaved=False.",
    caught="one sample a prompt (all advantages 0), statistics along the wrong axis, groups by place",
    check=AdvantageEstimator.check,
)
