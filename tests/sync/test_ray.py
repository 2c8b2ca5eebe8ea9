"""SamplerPool on a real Ray: the same rollouts as without, versions, a probe that finds other weights, a kill."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from earnest.config import RunConfig, load_file
from earnest.config.schema import SamplerConfig
from earnest.errors import SamplingError
from earnest.models import SampleSpec
from earnest.runs import replay
from earnest.runs.setup import Setup, build
from earnest.sync.base import SamplerLost
from earnest.sync.pool import SamplerPool
from earnest.sync.ray import RaySampler
from tests.runs.test_ahead import QUIET, check_record, lines, record, trained, weights
from tests.runs.tiny import recipe, tiny_folder

pytestmark = [pytest.mark.slow, pytest.mark.processes]  # a Ray, and actors that import torch each

SPEC = SampleSpec(max_new_tokens=8, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """A tiny run with two samplers."""
    place = tmp_path_factory.mktemp("samplers")
    path = recipe(place / "recipe.yaml", tiny_folder(place / "tiny"))
    made = build(load_file(path, ["sampling.workers=2", "threads=1"]), lambda _: None)
    yield made
    made.close()


def samplers(setup: Setup) -> SamplerPool:
    assert setup.samplers is not None
    return setup.samplers


def processes(setup: Setup) -> list[int]:
    members = [link.sampler for link in samplers(setup).links]
    return [member.process() for member in members if isinstance(member, RaySampler)]


def move(setup: Setup, by: float) -> None:
    """What an update does: other weights, the next version."""
    with torch.no_grad():
        for i, parameter in enumerate(setup.adapter.parameters()):
            parameter.add_(by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))
    setup.engine.version += 1


def test_samplers_give_what_the_trainer_would_have_sampled(setup: Setup) -> None:
    """Also after an update: the weights that sample are the version that the rollouts name. Equal prompts have draws of
    their own, so their completions differ."""
    prompts = [setup.policy.render(p.messages) for p in setup.task.prompts("train", 3, 0)]
    prompts = [prompts[0], prompts[1], prompts[0], prompts[2]]
    for round_ in range(2):
        there, here = setup.sample(prompts, 2, SPEC), setup.engine.sample(prompts, 2, SPEC)
        assert [(r.prompt_index, r.sample_index, r.tokens) for r in there] == [
            (r.prompt_index, r.sample_index, r.tokens) for r in here
        ]
        assert {r.policy_version for r in there} == {setup.engine.version}
        for a, b in zip(there, here, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert len({r.tokens for r in there if r.prompt == tuple(prompts[0])}) > 1
        found = samplers(setup).metrics
        assert found["sampler/version"] == setup.engine.version and found["sampler/probe"] < 1e-4
        if not round_:
            before = [r.tokens for r in there]
            move(setup, 0.5)
    assert [r.tokens for r in there] != before, "other weights sample other tokens"


def test_weights_that_changed_under_one_version_are_sent_again(setup: Setup) -> None:
    """A guard's quarantine is taken out for an evaluation, and the version stays: the content decides."""
    prompts = [setup.policy.render(p.messages) for p in setup.task.prompts("train", 2, 1)]
    setup.sample(prompts, 1, SPEC)
    with setup.adapter.scaled(1.0):
        kept = setup.adapter.state_dict()
        move(setup, 0.7)
        setup.engine.version -= 1
        assert [r.tokens for r in setup.sample(prompts, 1, SPEC)] == [
            r.tokens for r in setup.engine.sample(prompts, 1, SPEC)
        ]
        setup.adapter.load_state_dict(kept)
    there, here = setup.sample(prompts, 1, SPEC), setup.engine.sample(prompts, 1, SPEC)
    assert [r.tokens for r in there] == [r.tokens for r in here]


def test_a_sampler_that_is_killed_is_replaced_and_synced(setup: Setup) -> None:
    prompts = [setup.policy.render(p.messages) for p in setup.task.prompts("train", 4, 2)]
    expected = [r.tokens for r in setup.engine.sample(prompts, 1, SPEC)]
    victim = processes(setup)[0]
    os.kill(victim, signal.SIGKILL)
    assert [r.tokens for r in setup.sample(prompts, 1, SPEC)] == expected
    assert samplers(setup).metrics["sampler/restarts"] >= 1
    assert victim not in processes(setup)


def test_a_push_that_an_actor_did_not_apply_is_named(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [setup.policy.render(p.messages) for p in setup.task.prompts("train", 2, 3)]
    setup.sample(prompts, 1, SPEC)
    move(setup, 0.3)
    with monkeypatch.context() as patch:
        patch.setattr(RaySampler, "push", lambda self, weights: None)
        with pytest.raises(SamplingError, match=r"sampler 0 on Ray still runs old weights: after the push of version"):
            setup.sample(prompts, 1, SPEC)
    assert len(setup.sample(prompts, 1, SPEC)) == 2


def test_an_actor_that_gives_no_sign_of_life_is_replaced(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped, so it neither works nor ends by itself."""
    monkeypatch.setattr("earnest.sync.ray.HEALTH", 1.0)
    prompts = [setup.policy.render(p.messages) for p in setup.task.prompts("train", 4, 2)]
    expected = [r.tokens for r in setup.engine.sample(prompts, 1, SPEC)]
    victim = processes(setup)[0]
    os.kill(victim, signal.SIGSTOP)
    assert [r.tokens for r in setup.sample(prompts, 1, SPEC)] == expected
    assert victim not in processes(setup)


def test_the_probe_finds_a_sampler_with_other_base_weights(setup: Setup) -> None:
    """The trainer's base is changed slightly and the samplers' is not; nothing may be sampled."""
    prompts = [setup.policy.render(p.messages) for p in setup.task.prompts("train", 2, 3)]
    weight = setup.policy.model.get_input_embeddings().weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.add_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    move(setup, 0.3)
    with pytest.raises(SamplingError, match=r"sampler 0 on Ray is .* off the trainer on the probe .* other weights"):
        setup.sample(prompts, 1, SPEC)
    with torch.no_grad():
        weight.copy_(kept)
    move(setup, 0.01)
    assert len(setup.sample(prompts, 1, SPEC)) == 2


def test_a_whole_run_with_samplers_equals_the_run_without(setup: Setup, tmp_path: Path) -> None:
    """Rewards of every step and every held-out mean; the log-probs differ by rounding, so the weights do by a hair."""
    import io
    import json

    from rich.console import Console

    from earnest.runs import start

    results = []
    for name, workers in (("with", 1), ("without", 0)):
        sampling = setup.config.sampling.model_copy(update={"workers": workers})
        config = setup.config.model_copy(update={"sampling": sampling, "out": str(tmp_path / name), "steps": 2})
        folder = start("test", replace_eval(config), Console(file=io.StringIO())).folder
        lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
        results.append([(x["reward"], x.get("means")) for x in lines])
        steps = [x for x in lines if x["kind"] == "step"]
        assert all(("sampler/probe" in x["metrics"]) == (workers > 0) for x in steps)
    assert results[0] == results[1]


def replace_eval(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"eval": config.eval.model_copy(update={"every": 0})})


def test_an_actor_that_is_killed_while_the_run_trains_is_replaced(setup: Setup, tmp_path: Path) -> None:
    """Twice, in an asynchronous run: its rows are sampled again by its successor. No batch is trained twice or left
    out, none is too old, and the run replays bit for bit."""
    more = {
        "sampler": SamplerConfig(staleness=2),
        "sampling": setup.config.sampling.model_copy(update={"workers": 1}),
        "steps": 8,
        "out": str(tmp_path / "run"),
    }
    made = build(replace_eval(setup.config.model_copy(update=more)), lambda _: None)
    actor = samplers(made).links[0].sampler
    assert isinstance(actor, RaySampler)
    engine, inner, killed = made.require_local("a test"), made.require_local("a test").step, []

    def step(*given: Any, **more: Any) -> Any:
        if engine.version in (1, 4):
            while (victim := process(actor)) in (None, *killed):
                time.sleep(0.05)
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            killed.append(victim)
        return inner(*given, **more)

    engine.step = step  # type: ignore[method-assign]
    folder = trained(made)
    assert len(killed) == 2 and len(record(folder)) == 8
    check_record(folder, 2)
    last = [x["metrics"] for x in lines(folder) if x["kind"] == "step"][-1]
    assert last["sampler/restarts"] == 2
    assert weights(replay(folder, [f"out={tmp_path / 'again'}"], QUIET).folder) == weights(folder)


def process(actor: RaySampler) -> int | None:
    """The actor's process; None: it is gone, and its successor is not there yet."""
    try:
        return actor.process()
    except SamplerLost:
        return None
