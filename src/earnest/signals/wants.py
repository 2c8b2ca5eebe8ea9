"""What an objective declares about its batches, so that collecting and scoring need not know losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from earnest.signals.advantages import ESTIMATORS, Estimator
from earnest.signals.batch import Role, Signal
from earnest.signals.scorer import Who


@dataclass(frozen=True)
class Wants:
    """The rows and signals that a batch must have. The default fits any objective on rollouts.

    ``estimators`` are the advantage estimators that every term's definition allows, the preferred one first;
    ``reference`` is the policy that reference signals come from. ``any_row``: no term names a role, so rows of a file
    do as well as rollouts.
    """

    roles: frozenset[Role] = frozenset({"rollout"})
    signals: frozenset[Signal] = frozenset()
    estimators: tuple[Estimator, ...] = ESTIMATORS
    reference: Who = "base"
    any_row: bool = False


class Wanting(Protocol):
    """An objective or a single term."""

    def wants(self) -> Wants: ...
