"""Ray actors that sample: on the cluster that RAY_ADDRESS names, or on a Ray of this machine.

An actor builds the run's policy and adapter once and then takes versions of the adapter. While it works, it is asked
for a sign of life; one that gives none is killed. An actor that dies is replaced by a new one, which holds nothing
until the next push, and its rows are sampled again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from earnest.engines.local import LocalEngine
from earnest.errors import SamplingError
from earnest.models import SampleSpec
from earnest.rollouts.rollout import Rollout
from earnest.sync.base import SamplerEngine, SamplerLost, Weights
from earnest.sync.cluster import connect

START = 300.0
"""Seconds that actors may take to load the model."""
HEALTH = 30.0
"""Seconds between two checks of an actor that works, and seconds that it may take to answer one."""


class Actor(SamplerEngine):
    """In the actor's process. ``make`` builds the engine there."""

    def __init__(self, make: Callable[[], LocalEngine]) -> None:
        super().__init__(make())

    def process(self) -> int:
        return os.getpid()


class RaySampler:
    """The trainer's side of one actor, which takes one CPU and ``gpus`` GPUs of the cluster."""

    plain: bool | None = None

    def __init__(self, ray: Any, number: int, make: Callable[[], LocalEngine], gpus: float) -> None:
        self._ray, self._make, self._gpus = ray, make, gpus
        self.place = f"sampler {number} on Ray"
        self.restart()

    def restart(self) -> None:
        # Two threads: one works, the other answers health checks.
        options = {"num_cpus": 1, "num_gpus": self._gpus, "max_restarts": 0, "max_concurrency": 2}
        self.actor = self._ray.remote(Actor).options(**options).remote(self._make)
        self._started = False

    def push(self, weights: Weights) -> None:
        self._get(self.actor.push.remote(weights.version, dict(weights.state)))

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        return self._get(self.actor.score.remote([list(r) for r in rows]))

    def sample(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        return self._get(self.actor.sample.remote([list(p) for p in prompts], n, spec))

    def process(self) -> int:
        return int(self._get(self.actor.process.remote()))

    def close(self) -> None:
        self._ray.kill(self.actor)

    def _get(self, reference: Any) -> Any:
        """The answer, with health checks while there is none; an actor that loads its model answers none."""
        try:
            if not self._started:
                self._ray.get(self.actor.process.remote(), timeout=START)
                self._started = True
            while not self._ray.wait([reference], timeout=HEALTH)[0]:
                self._ray.get(self.actor.process.remote(), timeout=HEALTH)
            return self._ray.get(reference)
        except self._ray.exceptions.GetTimeoutError:
            self._ray.kill(self.actor)
            raise SamplerLost(f"{self.place} gave no sign of life and was ended.") from None
        except self._ray.exceptions.RayActorError as error:
            raise SamplerLost(f"{self.place} is gone: {error}") from None


def start(
    count: int, make: Callable[[], LocalEngine], gpus: float = 0.0
) -> tuple[list[RaySampler], Callable[[], None]]:
    """(``count`` actors that have loaded the model, what ends the Ray that was started for them)."""
    ray, own = connect("", count)
    samplers = [RaySampler(ray, number, make, gpus) for number in range(count)]
    ready = [sampler.actor.process.remote() for sampler in samplers]
    _, late = ray.wait(ready, num_returns=count, timeout=START)
    if late:
        free = ray.available_resources()
        raise SamplingError(
            f"{len(late)} of {count} samplers did not start within {START:.0f} s: the cluster has "
            f"{free.get('CPU', 0.0):g} free CPUs and {free.get('GPU', 0.0):g} free GPUs, and each takes 1 CPU and "
            f"{gpus:g} GPU. Give it more, or lower sampling.workers."
        )
    ray.get(ready)  # raises what an actor raised while it was made
    return samplers, ray.shutdown if own else lambda: None
