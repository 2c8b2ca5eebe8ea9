"""The trainer's side of every transport: divide the prompts, push and probe before sampling, check afterwards.

The trainer also scores the first completions of every version, at the sampling temperature. So log-probs of another
meaning (before temperature, with a penalty) are found before they are used as the behaviour policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from earnest.engines.local import LocalEngine
from earnest.errors import SamplingError
from earnest.models import SampleSpec
from earnest.rollouts.ledger import RolloutLedger
from earnest.rollouts.rollout import Rollout
from earnest.rollouts.trajectory import Trajectory
from earnest.signals import Batch
from earnest.sync.base import Sampler, SamplerLost, Weights, holding, logprobs, rows_batch
from earnest.sync.behaviour import BASE, OLD, RAW, reason
from earnest.sync.flow import TRIES, Flow, Work
from earnest.sync.partial import Partial, pieces
from earnest.sync.probe import Link, Logprobs, Target, apart, tolerance

T = TypeVar("T")
CHECKED = 16
"""Completions of every version that the trainer scores as well."""


class SamplerPool:
    """Samplers that follow one engine; ``sample`` has the signature of ``engine.sample``.

    ``rows`` are the probe's tokens. ``metrics``: the mean and the largest difference on the last probe, how far the
    weights had moved on it, the difference on sampled tokens (all in nats per token), the version, and restarts. With
    ``staleness`` above 0, ``ahead`` lets them work while the engine trains. With several ranks only rank 0 has members:
    it pushes and samples, and every rank gets its answers and checks them.
    """

    def __init__(
        self,
        engine: LocalEngine,
        rows: Sequence[Sequence[int]],
        members: Sequence[Sampler],
        close: Callable[[], None] = lambda: None,
        staleness: int = 0,
        partial: Partial = "finish",
    ) -> None:
        self.engine, self.rows, self.staleness, self.partial = engine, [list(r) for r in rows], staleness, partial
        self.links = [Link(m) for m in members]
        self.metrics: dict[str, float] = {"sampler/restarts": 0.0}
        self._target: Target | None = None
        self._recent: dict[int, Weights] = {}  # by version: those that rollouts may still have
        self._flow: Flow[Any] | None = None
        self._close = close

    def sample(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        """``n`` completions of every prompt, prompt by prompt, all by the engine's present version. Equal prompts go
        to one sampler, so that their draws differ. Samplers that work ahead of the trainer pause meanwhile."""
        with nullcontext() if self._flow is None else self._flow.paused():
            return self._sample(prompts, n, spec)

    def _sample(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        mesh, target = self.engine.mesh, self.target()
        if mesh.size == 1:
            flat, fresh = self._ask(target, prompts, n, spec)
        else:
            flat, fresh = self._first_asks(target, prompts, n, spec)
        self.accept(flat, fresh, spec, self.engine.version)
        return flat

    def _first_asks(
        self, target: Target, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec
    ) -> tuple[list[Rollout], list[Rollout]]:
        """The answers to rank 0. All ranks write the files of the weights: where these are in shards, each has a
        part."""
        mesh = self.engine.mesh
        for kind in mesh.from_first(sorted({bool(k) for k in (x.sampler.plain for x in self.links) if k is not None})):
            target.weights.files(kind)
        found: tuple[list[Rollout], list[Rollout]] = ([], [])
        problem: str | None = None
        if mesh.rank == 0:
            try:
                found = self._ask(target, prompts, n, spec)
            except SamplingError as error:
                problem = str(error)
        found, problem = mesh.from_first((found, problem))
        if problem is not None:
            raise SamplingError(problem)
        return found

    def _ask(
        self, target: Target, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec
    ) -> tuple[list[Rollout], list[Rollout]]:
        """What the samplers answer, and of it what is the first with their weights."""
        shares = share([tuple(p) for p in prompts], len(self.links))
        found: dict[int, list[Rollout]] = {}
        fresh: list[Rollout] = []

        def one(a: int) -> tuple[bool, list[Rollout]] | SamplerLost:
            link, own = self.links[a], [prompts[i] for i in shares[a]]
            try:
                return link.sync(target), link.sampler.sample(own, n, spec)
            except SamplerLost as lost:
                return lost

        for _ in range(TRIES):
            todo = [a for a, places in enumerate(shares) if places and places[0] not in found]
            if not todo:
                break
            with ThreadPoolExecutor(len(todo)) as pool:
                answers = dict(zip(todo, pool.map(one, todo), strict=True))
            for a, answer in answers.items():
                if isinstance(answer, SamplerLost):
                    self.links[a].sampler.restart()
                    self.links[a].forget()
                    self.metrics["sampler/restarts"] += 1
                    continue
                new, rollouts = answer
                fresh += rollouts[:CHECKED] if new else []
                for place, i in enumerate(shares[a]):
                    found[i] = [replace(r, prompt_index=i) for r in rollouts if r.prompt_index == place]
        missing = [i for i in range(len(prompts)) if i not in found]
        if missing:
            raise SamplingError(f"samplers died {TRIES} times on {len(missing)} prompts; see their logs.")
        return [r for i in range(len(prompts)) for r in found[i]], fresh

    def accept(
        self,
        rollouts: Sequence[Rollout | Trajectory],
        fresh: Sequence[Rollout | Trajectory],
        spec: SampleSpec,
        version: int,
    ) -> None:
        """Raise unless the rollouts are of ``version`` and those that are the first of a sampler with these weights,
        ``fresh``, have the log-probs of the versions that they name. Where rollouts continue under new weights, their
        tokens may be of later versions that the trainer has had."""
        later = {v for v in self._recent if v > version} if self.partial == "continue" else set()
        stale = sorted({part.policy_version for r in rollouts for part in pieces(r)} - {version, *later})
        if stale:
            raise SamplingError(
                f"a sampler answered with version {', '.join(map(str, stale))}; version {version} was requested."
            )
        if fresh and spec.top_p == 1.0 and spec.top_k == 0:
            parts = [part for rollout in fresh for part in pieces(rollout)]
            for one in sorted({part.policy_version for part in parts}):
                self._check_behaviour([part for part in parts if part.policy_version == one], self._recent[one])
        self.metrics |= {
            "sampler/probe": max((link.off for link in self.links), default=0.0),
            "sampler/probe_max": max((link.worst for link in self.links), default=0.0),
            "sampler/moved": max((link.moved for link in self.links), default=0.0),
            "sampler/version": float(version),
        }

    def ahead(self, ledger: RolloutLedger[T], work: Work[T]) -> Flow[T]:
        """Start the samplers' threads: from now on they work ahead of the trainer."""
        assert self._flow is None
        self._flow = Flow(self.links, ledger, self.target(), work, self.partial)
        return self._flow

    def close(self) -> None:
        if self._flow is not None:
            self._flow.close()
        for link in self.links:
            link.sampler.close()
        self._close()

    def target(self) -> Target:
        """The engine's weights with its own log-probs of the probe, computed once for each content."""
        weights = Weights.of(self.engine)
        old = self._target
        if old is None or old.weights.digest != weights.digest:
            batch = rows_batch(self.rows, self.engine.policy.pad_id)
            base = logprobs(self.engine, batch, "base") if old is None else old.base
            self._target = Target(weights, self.rows, logprobs(self.engine, batch), base)
            if self.staleness:  # a push in a sampler's thread must not read the adapter while it is trained
                for kind in {link.sampler.plain for link in self.links} - {None}:
                    weights.files(bool(kind))
            self._recent.pop(weights.version, None)
            self._recent[weights.version] = weights
            # the oldest use, not the lowest number: a run may go back to the version of its best checkpoint
            for version in list(self._recent)[: -self.staleness - 2]:
                del self._recent[version]
        assert self._target is not None
        return self._target

    def _check_behaviour(self, rollouts: Sequence[Rollout], weights: Weights) -> None:
        """The log-probs that samplers report are those that the trainer computes for the same tokens."""
        policy, temperature = self.engine.policy, rollouts[0].temperature
        batch = Batch.from_rows([r.prompt for r in rollouts], [r.tokens for r in rollouts], pad=policy.pad_id)
        theirs = torch.tensor([v for r in rollouts for v in r.logprobs], dtype=torch.float64)
        with holding(self.engine, weights):
            own, allowed = logprobs(self.engine, batch, "live", temperature), tolerance(policy.dtype)
            off = apart(theirs, own)
            if not off <= allowed:
                place = self.links[0].sampler.place if self.links else "the sampler"
                raise SamplingError(
                    f"{place} reports log-probs of what it sampled that are {off:.3g} nats per token off those of "
                    f"version {weights.version} at temperature {temperature:g} (allowed: {allowed:g}). "
                    f"{reason(theirs, own, self._others(batch, weights, temperature), allowed)}"
                )
        self.metrics |= {"sampler/behaviour": off}

    def _others(self, batch: Batch, weights: Weights, temperature: float) -> dict[str, Logprobs]:
        """What the log-probs may be instead, by the sentence for it."""
        others = {RAW: logprobs(self.engine, batch, "live", 1.0)}
        before = self._recent.get(weights.version - 1)
        if before is not None:
            with holding(self.engine, before):
                others[OLD] = logprobs(self.engine, batch, "live", temperature)
        others[BASE] = logprobs(self.engine, batch, "base", temperature)
        return others


def share(prompts: Sequence[tuple[int, ...]], count: int) -> list[list[int]]:
    """Places of the prompts for each of ``count`` samplers: distinct ones in turn, equal ones together."""
    owner: dict[tuple[int, ...], int] = {}
    shares: list[list[int]] = [[] for _ in range(count)]
    for place, prompt in enumerate(prompts):
        shares[owner.setdefault(prompt, len(owner) % count)].append(place)
    return shares
