"""The probe's bounds, with a real engine as the sampler; the parts of samplers that need no server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from earnest.config import load_file
from earnest.errors import SamplingError
from earnest.models import SampleSpec
from earnest.runs.setup import build
from earnest.sync.base import SamplerEngine, SamplerLost
from earnest.sync.behaviour import TRUNCATED, UNKNOWN, reason
from earnest.sync.contract.requests import independent
from earnest.sync.pool import SamplerPool
from earnest.sync.probe import TOLERANCE, WORST
from earnest.sync.ray import Actor
from earnest.sync.server import Server
from earnest.sync.servers import ServerSampler
from tests.runs.test_ahead import Elsewhere
from tests.runs.tiny import recipe, tiny_folder


class OneTokenOff(Elsewhere):
    """Its log-prob of a single token of the probe is off."""

    by = 0.0

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        found = super().score(rows)
        return [found[0] + self.by, *found[1:]]


def test_one_token_that_is_far_off_is_found_where_the_mean_is_not(tmp_path: Path) -> None:
    config = load_file(recipe(tmp_path / "recipe.yaml", tiny_folder(tmp_path / "tiny")), ["threads=1"])
    setup = build(config, lambda _: None)
    engine, task = setup.require_local("a test"), setup.task
    assert task is not None
    rows = [list(setup.policy.render(p.messages)) for p in task.prompts("heldout", 8, 0)]
    tokens, allowed = sum(len(r) - 1 for r in rows), TOLERANCE[engine.policy.dtype]
    member = OneTokenOff(0, config)
    pool = SamplerPool(engine, rows, [member])
    assert (pool.staleness, pool.partial) == (0, "finish"), "by default samplers wait for the trainer"
    member.by = 2 * WORST * allowed
    assert member.by / tokens < allowed, "the mean alone would pass"
    with pytest.raises(SamplingError, match=r"and 0\.02 at one token; it runs other weights"):
        pool.sample(rows[:1], 1, SampleSpec(max_new_tokens=2))
    member.by = 0.0
    assert len(pool.sample(rows[:1], 1, SampleSpec(max_new_tokens=2))) == 1
    assert pool.metrics["sampler/probe"] <= pool.metrics["sampler/probe_max"] < 1e-4
    for plain, files in ((None, set()), (True, {True})):
        member.plain = plain
        ahead = SamplerPool(engine, rows, [member], staleness=1)
        assert set(ahead.target().weights._files) == files, "files are written only for a sampler that reads them"


def test_an_actor_samples_as_its_engine_does(tmp_path: Path) -> None:
    config = load_file(recipe(tmp_path / "recipe.yaml", tiny_folder(tmp_path / "tiny")), ["threads=1"])
    actor = Actor(lambda: build(config, lambda _: None).require_local("a test"))
    prompts, spec = [[5, 6, 7], [8, 9]], SampleSpec(max_new_tokens=3)
    same = SamplerEngine(actor.engine)
    assert actor.sample(prompts, 2, spec) == same.sample(prompts, 2, spec)
    assert actor.score(prompts) == same.score(prompts)


def test_log_probs_at_the_bound_are_truncated_ones() -> None:
    own = torch.tensor([-1.0, -2.0])
    assert reason(own - torch.tensor([0.5, -0.5]), own, {}, 0.5) == TRUNCATED
    assert reason(own - torch.tensor([0.625, -0.5]), own, {}, 0.5) == UNKNOWN


def test_the_spread_of_equal_pairs_is_that_of_independent_draws() -> None:
    """Uniform over 2 tokens, 16 draws: 120 pairs, of which 60 are equal; pairs with a common draw are independent
    there, so the variance is 120 / 4.
    """
    session: Any = SimpleNamespace(
        prompts=[(1,)],
        spec=lambda **_: None,
        ask=lambda _, n: [SimpleNamespace(tokens=(i % 2,)) for i in range(n)],
        logits=lambda *_: torch.zeros(1, 2),
        finding=lambda law, measured, expected, holds, meaning: (measured, expected, holds),
    )
    ((measured, expected, _),) = independent(session)
    assert measured.startswith("56 pairs") and expected.startswith("60 ± 5;")


def test_whole_weights_that_are_not_there_any_more_are_a_lost_sampler(tmp_path: Path) -> None:
    """vLLM was started again, or another run replaced its weights; and the folder of a push may be gone already."""
    server: Any = object.__new__(Server)
    server.kind, server.folder, server.url, server.base = "vllm", str(tmp_path), "http://there", "base"
    weights: Any = SimpleNamespace(
        version=1, digest="d" * 16, whole=True, policy=SimpleNamespace(eos_ids=frozenset()), files=lambda plain: {}
    )
    held = []

    def reload(place: str, name: str) -> None:
        held.append(name)
        Path(place).rmdir()

    server.reload, server.holds = reload, lambda: held[-1]
    sampler = ServerSampler(server)
    sampler.push(weights)
    assert sampler.sample([], 1, SampleSpec(max_new_tokens=2)) == []
    held.append("base")
    with pytest.raises(SamplerLost, match="has the weights 'base' in place of 'earnest-"):
        sampler.sample([], 1, SampleSpec(max_new_tokens=2))
