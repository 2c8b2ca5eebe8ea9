"""The keys under `sync`, and the rounds of a run with replicas, computed from its config and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from earnest.config.kinds import Strict, Whole
from earnest.errors import ConfigError

if TYPE_CHECKING:
    from earnest.config.schema import RunConfig


class SyncConfig(Strict):
    """How replicas synchronize; see docs/diloco.md."""

    algorithm: Literal["diloco", "local_sgd"] = Field(
        "diloco", description="an outer optimizer on the average difference, or the average weights"
    )
    every: Whole = Field(10, description="updates between two synchronizations of the same weights")
    fragments: Whole = Field(1, description="parts of the weights that are synchronized one after the other")
    delay: int = Field(0, ge=0, description="updates that are made while a fragment is being exchanged")
    alpha: float = Field(0.0, ge=0, le=1, description="share of the local weights that is kept at a synchronization")
    lr: float = Field(
        1.0, gt=0, description="the outer optimizer's learning rate; lr / (1 - momentum) above 1 overshoots"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="the outer optimizer's momentum")
    max_norm: float | None = Field(
        None, gt=0, description="a difference longer than this multiple of the round's median length is scaled to it"
    )
    signers: list[str] | None = Field(
        None, min_length=1, description="public keys by replica number: a difference without its signature is left out"
    )
    nesterov: bool = Field(True, description="look ahead along the outer momentum")
    wire: Literal["fp32", "bf16", "int8", "int4", "topk", "sparseloco", "pulse"] | None = Field(
        None, description="how differences are encoded; none: bf16, and fp32 for local_sgd"
    )
    density: float | None = Field(
        None, gt=0, le=1, description="the share of weights that topk and sparseloco send; none: 1/64"
    )
    feedback: float | None = Field(
        None,
        ge=0,
        le=1,
        description="the share of what a lossy wire did not send that is added to the next difference; none: 0.95 for "
        "sparseloco, 1 for others",
    )
    quorum: int | None = Field(None, ge=1, description="replicas that a round needs; none: half of them, rounded up")
    grace: float = Field(30.0, ge=0, description="seconds that a round waits for late replicas once it has its quorum")
    timeout: float = Field(3600.0, gt=0, description="seconds after which a round without quorum is an error")
    snapshot_every: Whole = Field(10, description="rounds between two whole states in the bucket")
    groups: Whole = Field(
        1, description="1: every replica reads every difference; more: groups average first, about √replicas is best"
    )
    max_restarts: int = Field(3, ge=0, description="how often a replica that died is started again")
    lighthouse: str | None = Field(
        None,
        min_length=1,
        description="address of a torchft Lighthouse: replicas then synchronize over the network instead",
    )

    @model_validator(mode="after")
    def _agree(self) -> SyncConfig:
        averaged = ("fragments", "delay", "alpha", "lr", "momentum", "nesterov", "max_norm", "feedback")
        exchanged = ("wire", "density", "feedback", "grace", "max_norm", "signers", "groups")
        for used, why, keys in (
            (self.algorithm == "local_sgd", "algorithm: local_sgd", averaged),
            (self.lighthouse is not None, "lighthouse", exchanged),
        ):
            given = [key for key in self.changed(*keys) if key != "wire" or self.wire != "fp32"]
            if used and given:
                raise ConfigError(f"{given[0]} has no meaning with {why}; leave it out")
        bad = [key for key in self.signers or () if not re.fullmatch(r"[0-9a-f]{64}", key)]
        if bad:
            raise ConfigError(f"signers: {bad[0]!r} is not a public key; `python -m earnest.diloco.signing` prints one")
        if self.algorithm == "local_sgd" and self.wire not in (None, "fp32"):
            raise ConfigError(f"wire: local_sgd averages weights, so {self.wire} would lose them; leave it out")
        return self


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
    if sync.density is not None and sync.wire not in ("topk", "sparseloco"):
        raise ConfigError(
            f"sync.density: only the wires topk and sparseloco have a density, not {sync.wire or 'bf16'}; leave it out"
        )
    if sync.feedback is not None and sync.wire == "fp32":
        raise ConfigError("sync.feedback: fp32 sends everything, so nothing is fed back; leave it out")
    if config.replicas % sync.groups:
        raise ConfigError(f"sync.groups: {sync.groups} groups of the same size need a multiple of as many replicas")
    if sync.groups > 1 and (sync.max_norm is not None or sync.signers is not None):
        raise ConfigError(
            "sync.groups: members write their group's mean, so max_norm and signers cannot bound one of them; set 1"
        )
    quorum = sync.quorum or -(-config.replicas // 2)
    if quorum > config.replicas:
        raise ConfigError(f"sync.quorum: {quorum} is more than the {config.replicas} replicas; lower it")
    if sync.signers is not None and len(sync.signers) != config.replicas:
        raise ConfigError(
            f"sync.signers: has {len(sync.signers)} public keys for {config.replicas} replicas; give one for each"
        )
    return ReplicaPlan(config, interval, config.steps * updates // interval, quorum)
