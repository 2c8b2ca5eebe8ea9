"""Sampling by Ray actors of its own, apart from the process that trains.

Before a request whose weights the samplers do not have yet, the adapter goes to each of them as a *version*; each then
answers with its log-probs of a few fixed tokens, the probe, which must be the trainer's own:

    max_t |lp_sampler(t) - lp_trainer(t)| ≤ tolerance        else the run stops

They live on the cluster that RAY_ADDRESS names, or on a Ray of this machine. A sampler with other base weights, a stale
or torn adapter, or another precision is found before its first rollout. A rollout carries the version that its sampler
says it has. A sampler that dies is started again and synced.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from earnest.config import RunConfig
from earnest.engines.base import LogProbsWanted, Rollout
from earnest.engines.local import LocalEngine
from earnest.errors import SamplingError
from earnest.models import SampleSpec
from earnest.signals import Batch

if TYPE_CHECKING:
    from earnest.runs.setup import Setup

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
COARSE = 0.1
"""Nats in 16 bits, where products of other shapes round differently."""
PROBES = 4
TRIES = 3
START = 300.0


class Sampler:
    """In the actor: the run's policy and adapter, and no optimizer's business."""

    def __init__(self, config: str) -> None:
        from earnest.config import from_mapping
        from earnest.config.text import parse
        from earnest.runs.setup import adapted

        made = from_mapping(parse(config, "the run's config"))
        torch.set_num_threads(made.threads or 1)
        policy, adapter = adapted(made, made.task.build(), lambda _: None)
        self.engine = LocalEngine(policy, adapter)

    def become(self, version: int, state: dict[str, Tensor], probe: Batch) -> Tensor:
        """Take these weights; what the probe's tokens are worth under them."""
        self.engine.adapter.load_state_dict(state)
        self.engine.version = version
        return probe_logprobs(self.engine, probe)

    def process(self) -> int:
        return os.getpid()

    def sample(self, prompts: list[list[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        return self.engine.sample(prompts, n, spec)


def probe_logprobs(engine: LocalEngine, probe: Batch) -> Tensor:
    found = engine.score(probe, LogProbsWanted(), "live")
    assert isinstance(found, Tensor)
    return found.cpu()


class RaySamplers:
    """The trainer's side. ``metrics`` say how far off the last probe was, which version was synced, and restarts."""

    def __init__(self, config: RunConfig, say: Callable[[str], None]) -> None:
        from earnest.config import dump
        from earnest.diloco.executors.ray import connect

        count = config.sampling.workers
        say(f"starting {count} samplers on Ray")
        self._ray, self._own = connect("", count)
        self._config = dump(config)
        self._actors = [self._start() for _ in range(count)]
        ready = [actor.process.remote() for actor in self._actors]
        _, late = self._ray.wait(ready, num_returns=count, timeout=START)
        if late:
            raise SamplingError(
                f"{len(late)} of {count} samplers did not start within {START:.0f} s: the cluster has {self._free():g} "
                "free CPUs, and each takes one. Give it more, or lower sampling.workers."
            )
        self._ray.get(ready)  # what a sampler raised while it was made
        self._holds: list[str | None] = [None] * count
        self.metrics: dict[str, float] = {"sampler/restarts": 0.0}

    def _free(self) -> float:
        return float(self._ray.available_resources().get("CPU", 0.0))

    def _start(self) -> Any:
        return self._ray.remote(Sampler).options(num_cpus=1, max_restarts=0).remote(self._config)

    def sample(self, setup: Setup, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        """What ``engine.sample`` gives, prompt by prompt; equal prompts stay with one sampler, so draws differ."""
        shares = self._share([tuple(p) for p in prompts])
        found: dict[int, list[Rollout]] = {}
        for attempt in range(TRIES):
            todo = [a for a, places in enumerate(shares) if places and places[0] not in found]
            if not todo:
                break
            if attempt:
                self.metrics["sampler/restarts"] += len(todo)
            try:
                self._sync(setup, todo)
            except self._ray.exceptions.RayActorError:
                self._replace_dead()
                continue
            asked = {a: self._actors[a].sample.remote([list(prompts[i]) for i in shares[a]], n, spec) for a in todo}
            for a, reference in asked.items():
                try:
                    rollouts = self._ray.get(reference)
                except self._ray.exceptions.RayActorError:
                    self._replace_dead()
                    continue
                for place, i in enumerate(shares[a]):
                    found[i] = [_moved(r, i) for r in rollouts if r.prompt_index == place]
        missing = [i for i in range(len(prompts)) if i not in found]
        if missing:
            raise SamplingError(f"samplers on Ray died {TRIES} times on {len(missing)} prompts; look at Ray's logs.")
        flat = [r for i in range(len(prompts)) for r in found[i]]
        stale = {r.policy_version for r in flat} - {setup.engine.version}
        if stale:
            raise SamplingError(
                f"a sampler answered with version {sorted(stale)}, the trainer has {setup.engine.version}."
            )
        return flat

    def _share(self, prompts: Sequence[tuple[int, ...]]) -> list[list[int]]:
        """Places of the prompts for each sampler: distinct ones in turn, equal ones together."""
        whose: dict[tuple[int, ...], int] = {}
        shares: list[list[int]] = [[] for _ in self._actors]
        for place, prompt in enumerate(prompts):
            shares[whose.setdefault(prompt, len(whose) % len(shares))].append(place)
        return shares

    def _sync(self, setup: Setup, whom: Sequence[int]) -> None:
        """Give these samplers the trainer's weights where they hold others, and probe what they make of them."""
        state = {name: tensor.cpu() for name, tensor in setup.adapter.state_dict().items()}
        digest = weights_digest(setup.engine.version, state)
        behind = [a for a in whom if self._holds[a] != digest]
        if not behind:
            return
        probe = probe_batch(setup)
        shared = self._ray.put(state)
        asked = [self._actors[a].become.remote(setup.engine.version, shared, probe) for a in behind]
        own = probe_logprobs(setup.engine, probe)
        allowed = TOLERANCE.get(setup.policy.dtype, COARSE)
        for a, reference in zip(behind, asked, strict=True):
            off = float((self._ray.get(reference) - own).abs().max())
            if not off <= allowed:
                raise SamplingError(
                    f"sampler {a} is {off:.3g} nats off the trainer on the probe of version {setup.engine.version} "
                    f"(allowed: {allowed:g}); it has other weights. Is the model on its node the same?"
                )
            self._holds[a] = digest
            self.metrics |= {"sampler/probe": off, "sampler/version": float(setup.engine.version)}

    def _replace_dead(self) -> None:
        for a, actor in enumerate(self._actors):
            try:
                self._ray.get(actor.__ray_ready__.remote())
            except self._ray.exceptions.RayActorError:
                self._actors[a], self._holds[a] = self._start(), None

    def processes(self) -> list[int]:
        """Where the samplers run: their process ids."""
        return list(self._ray.get([actor.process.remote() for actor in self._actors]))

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._own:
            self._ray.shutdown()


def probe_batch(setup: Setup) -> Batch:
    """A few held-out prompts as completions of their own first token: the same at every sync."""
    texts = probe_texts(setup)
    return Batch.from_rows([t[:1] for t in texts], [t[1:] for t in texts], pad=setup.policy.pad_id)


def probe_texts(setup: Setup) -> list[list[int]]:
    """The tokens that every probe is about."""
    return [list(setup.policy.render(p.messages)) for p in setup.task.prompts("heldout", PROBES, 0)]


def weights_digest(version: int, state: dict[str, Tensor]) -> str:
    """Of the weights themselves: inside ``deployed()`` they differ under one version."""
    total = hashlib.sha256(str(version).encode())
    for name in sorted(state):
        total.update(name.encode())
        total.update(state[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def _moved(rollout: Rollout, prompt_index: int) -> Rollout:
    from dataclasses import replace

    return replace(rollout, prompt_index=prompt_index)
