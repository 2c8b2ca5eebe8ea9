"""Samplers that reach only a bucket: the trainer's own tokens, every version probed, open requests answered late."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from earnest.config import RunConfig, dump, from_mapping, load_file
from earnest.engines import LocalEngine
from earnest.errors import SamplingError
from earnest.models import SampleSpec
from earnest.runs.sampling import follow, put_config, samplers_of, sampling_engine
from earnest.runs.setup import Setup, build
from earnest.store import Bucket
from earnest.sync import base, bucket
from earnest.sync.pool import SamplerPool
from tests.runs.tiny import recipe, tiny_folder

SPEC = SampleSpec(max_new_tokens=6, temperature=0.8, seed=5)


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    place = tmp_path_factory.mktemp("bucket")
    path = recipe(place / "recipe.yaml", tiny_folder(place / "tiny"))
    return build(load_file(path, ["threads=1"]), lambda _: None)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(bucket, "POLL", 0.005)
    monkeypatch.setattr(bucket, "SLOWEST", 0.01)
    return f"file://{tmp_path}/bucket"


def config_of(setup: Setup, url: str, **more: Any) -> RunConfig:
    data = setup.config.model_dump(mode="json", by_alias=True, exclude_none=True)
    return from_mapping({**data, "sampler": {"url": url, **more}})


def trainer(setup: Setup, url: str, **more: Any) -> SamplerPool:
    made = samplers_of(config_of(setup, url, **more), setup.task, setup.engine, lambda _: None)
    assert made is not None
    return made


def move(setup: Setup, by: float) -> None:
    with torch.no_grad():
        for i, parameter in enumerate(setup.adapter.parameters()):
            parameter.add_(by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))
    setup.engine.version += 1


def asked(setup: Setup, count: int = 3) -> list[list[int]]:
    return [list(setup.policy.render(p.messages)) for p in setup.task.prompts("train", count, 0)]


@contextmanager
def serving(url: str, engines: list[LocalEngine]) -> Iterator[None]:
    """SamplerPool 0, 1, … in threads; the trainer's ``close`` ends them."""
    threads = [
        threading.Thread(target=bucket.serve, args=(Bucket.open(url), i, engine)) for i, engine in enumerate(engines)
    ]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def fresh(setup: Setup) -> LocalEngine:
    return sampling_engine(dump(setup.config))


def test_two_samplers_give_what_the_trainer_would_have_sampled(setup: Setup, url: str) -> None:
    """Also after an update; every rollout names the version, and answered requests and old versions are removed."""
    there = trainer(setup, url, count=2)
    with serving(url, [fresh(setup), fresh(setup)]):
        try:
            for _ in range(2):
                move(setup, 0.3)
                found, here = there.sample(asked(setup), 2, SPEC), setup.engine.sample(asked(setup), 2, SPEC)
                assert [(r.prompt_index, r.sample_index, r.tokens, r.policy_version) for r in found] == [
                    (r.prompt_index, r.sample_index, r.tokens, r.policy_version) for r in here
                ]
                for a, b in zip(found, here, strict=True):
                    assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
                assert there.metrics["sampler/probe"] < 1e-5 and there.metrics["sampler/behaviour"] < 1e-5
            kinds = [key.split("/")[2] for key in Bucket.open(url).list("samplers/")]
            assert kinds == ["version", "version"]
        finally:
            there.close()


@pytest.mark.parametrize("size", [1e-5, 0.3], ids=["a small step", "a large step"])
def test_a_sampler_that_does_not_apply_a_version_is_refused(
    setup: Setup, url: str, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the version's number and keeps its weights; a step below the tolerance is found, too."""
    move(setup, 0.3)
    there, engine = trainer(setup, url), fresh(setup)
    with serving(url, [engine]):
        try:
            there.sample(asked(setup, 1), 1, SPEC)
            monkeypatch.setattr(
                base.SamplerEngine, "push", lambda self, version, state: setattr(engine, "version", version)
            )
            move(setup, size)
            for _ in range(2):  # a second request does not make it right
                with pytest.raises(SamplingError, match=r"sampler 0 of .* still runs old weights"):
                    there.sample(asked(setup, 1), 1, SPEC)
            monkeypatch.undo()
            monkeypatch.setattr(bucket, "POLL", 0.005)
            engine.adapter.load_state_dict(setup.adapter.state_dict())
        finally:
            there.close()


@pytest.mark.parametrize("place", [0, -1])
def test_a_probe_that_is_not_a_number_fails(
    place: int, setup: Setup, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A maximum would pass over a NaN that is not the first."""
    score = base.SamplerEngine.score

    def broken(self: base.SamplerEngine, rows: Any) -> list[float]:
        found = score(self, rows)
        found[place] = float("nan")
        return found

    monkeypatch.setattr(base.SamplerEngine, "score", broken)
    there = trainer(setup, url)
    with serving(url, [fresh(setup)]):
        try:
            with pytest.raises(SamplingError, match="is nan nats per token off the trainer"):
                there.sample(asked(setup, 1), 1, SPEC)
        finally:
            there.close()


def test_a_sampler_that_comes_late_answers_the_open_request(setup: Setup, url: str) -> None:
    """A killed sampler leaves its request in the bucket; the next one of its number takes the weights and answers."""
    there = trainer(setup, url)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(there.sample(asked(setup), 1, SPEC)))
    waiting.start()
    store = Bucket.open(url)
    while not store.list("samplers/00000/request/"):
        pass
    with serving(url, [fresh(setup)]):
        waiting.join(20)
        there.close()
    assert [r.tokens for r in found[0]] == [r.tokens for r in setup.engine.sample(asked(setup), 1, SPEC)]


def test_without_a_sampler_the_run_names_the_command(setup: Setup, url: str) -> None:
    there = trainer(setup, url, timeout=0.05)
    with pytest.raises(SamplingError, match=r"sampler 0 of .* did not answer .* Is `earnest sampler .* --number 0`"):
        there.sample(asked(setup, 1), 1, SPEC)


def test_a_mistake_is_an_answer_and_the_sampler_goes_on(setup: Setup, url: str) -> None:
    there = trainer(setup, url)
    with serving(url, [fresh(setup)]):
        try:
            with pytest.raises(SamplingError, match=r"sampler 0 of .*: .* positions of"):
                there.sample(asked(setup, 1), 1, SampleSpec(max_new_tokens=100_000))
            assert len(there.sample(asked(setup, 1), 1, SPEC)) == 1
        finally:
            there.close()


def test_a_prefix_of_another_run_is_refused(setup: Setup, url: str) -> None:
    from rich.console import Console

    with pytest.raises(SamplingError, match="there is no run at"):
        follow(url, 0, Console())
    config = config_of(setup, url)
    put_config(Bucket.open(url), dump(config))
    put_config(Bucket.open(url), dump(config))  # a resumed trainer
    with pytest.raises(SamplingError, match="has the settings of another run"):
        put_config(Bucket.open(url), dump(config.model_copy(update={"seed": 99})))
