"""Metrics of a batch that is split into micro-batches: each can merge the values of two parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Mean:
    """Σ w·x over Σ w."""

    total: float
    count: float

    @classmethod
    def of(cls, values: Tensor, weight: Tensor | None = None) -> Mean:
        values = values.detach().double()
        weight = torch.ones_like(values) if weight is None else weight.detach().double()
        return cls(float((values * weight).sum()), float(weight.sum()))

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else float("nan")


@dataclass(frozen=True)
class Sum:
    """A count or a total."""

    value: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True)
class Max:
    """The largest value."""

    value: float

    @classmethod
    def of(cls, values: Tensor) -> Max:
        return cls(float(values.detach().max()) if values.numel() else float("-inf"))

    def merge(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


Metric = Mean | Sum | Max


def merge(parts: list[Mapping[str, Metric]]) -> dict[str, Metric]:
    """The whole batch's metrics from those of its parts."""
    whole: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            whole[name] = whole[name].merge(metric) if name in whole else metric  # type: ignore[arg-type]
    return whole
