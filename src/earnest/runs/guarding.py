"""The guard that a config asks for."""

from __future__ import annotations

from typing import Any

from earnest.adapters import Adapter
from earnest.config import RunConfig
from earnest.engines import LocalEngine
from earnest.errors import ConfigError
from earnest.guards import DirectionGuard, Directions, Erase, Route, directions_from_gradients, read_triples
from earnest.models import Policy
from earnest.objectives import Objective


def guard_of(config: RunConfig, policy: Policy, adapter: Adapter, objective: Objective) -> DirectionGuard | None:
    """The guard; None without ``guard:``. Directions from triples use the run's objective, temperature and length."""
    wanted = config.guard
    if wanted is None:
        return None
    kind = Route if wanted.kind == "route" else Erase
    settings: dict[str, Any] = {name: getattr(wanted, name) for name in ("gate", "overshoot", "preserve", "at")}
    if wanted.directions is not None:
        return kind(Directions.load(wanted.directions), **settings)
    assert wanted.triples is not None
    triples = read_triples(wanted.triples)
    bare = LocalEngine(policy, adapter, config.optimizer.build(), micro_tokens=config.micro_tokens)

    def extract() -> Directions:
        return directions_from_gradients(
            bare,
            triples,
            objective,
            top=wanted.top,
            floor=wanted.floor,
            temperature=config.sampling.temperature,
            max_length=config.sampling.max_new_tokens,
        )

    if wanted.refresh and config.replicas > 1:
        raise ConfigError(
            f"guard.refresh: {config.replicas} replicas have different parameters between two synchronizations and "
            "would extract different directions; set guard.refresh=0, or replicas=1"
        )
    again: dict[str, Any] = {"every": wanted.refresh, "extract": extract} if wanted.refresh else {}
    return kind(extract(), **settings, **again)
