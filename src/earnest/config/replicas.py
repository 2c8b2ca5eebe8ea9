"""The rounds of a run with replicas, computed from its config, and the checks of `replicas` and `sync`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from earnest.errors import ConfigError

if TYPE_CHECKING:
    from earnest.config.schema import RunConfig


@dataclass(frozen=True)
class ReplicaPlan:
    """Rounds, and the updates between two of them."""

    config: RunConfig
    interval: int
    rounds: int
    quorum: int

    def steps_at(self, rounds: int) -> int:
        """Steps that a replica has passed after ``rounds``."""
        return rounds * self.interval // self.config.updates_per_batch


def plan(config: RunConfig) -> ReplicaPlan:
    """Check the numbers against each other; every refusal names the one to change."""
    sync, updates = config.sync, config.updates_per_batch
    if config.engine.kind != "local":
        raise ConfigError(f"replicas: {config.engine.kind} trains in one place; use engine.kind=local, or replicas=1")
    if sync.every % sync.fragments:
        raise ConfigError(f"sync.every: must be a multiple of sync.fragments ({sync.fragments}), got {sync.every}")
    interval = sync.every // sync.fragments
    if sync.delay >= interval:
        raise ConfigError(f"sync.delay: must be below every / fragments ({interval}), got {sync.delay}")
    if interval % updates:
        raise ConfigError(
            f"sync.every: a round ends between two steps, so every / fragments ({interval}) must be a multiple of "
            f"updates_per_batch ({updates})"
        )
    if (config.steps * updates) % interval:
        raise ConfigError(
            f"steps: the last round ends the run, so steps × updates_per_batch must be a multiple of {interval} "
            f"(sync.every / sync.fragments), got {config.steps * updates}"
        )
    if sync.density is not None and sync.wire != "topk":
        raise ConfigError(f"sync.density: only wire topk has a density, not {sync.wire or 'bf16'}; leave it out")
    quorum = sync.quorum or -(-config.replicas // 2)
    if quorum > config.replicas:
        raise ConfigError(f"sync.quorum: {quorum} is more than the {config.replicas} replicas; lower it")
    return ReplicaPlan(config, interval, config.steps * updates // interval, quorum)
