"""A run that starts its own server: other programs sample the run's newest weights there, by tokens."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from earnest.config import from_mapping
from earnest.errors import EarnestError, SamplingError
from earnest.models import places
from earnest.runs.sampling import samplers_of
from earnest.runs.setup import Setup, build
from earnest.sync import own_server
from earnest.sync.own_server import OwnServer
from earnest.sync.servers import ServerSampler
from tests.sync.test_servers import RECIPE, SPEC, prompts, train

ASKED: Any = [{"role": "user", "content": "What does the lamp cost?"}]


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    made = build(from_mapping({**RECIPE, "sampler": {"port": 0}}), lambda _: None)
    yield made
    made.close()


def address(setup: Setup) -> str:
    assert setup.samplers is not None
    member = setup.samplers.links[0].sampler
    assert isinstance(member, ServerSampler)
    return member.server.url


def generate(url: str, tokens: list[int], **more: Any) -> dict[str, Any]:
    params = {"max_tokens": 8, "temperature": 0.7, "seed": 3, "logprobs": 1}
    body = json.dumps({"model": "pushed", "token_ids": tokens, "sampling_params": params, **more}).encode()
    request = urllib.request.Request(f"{url}/inference/v1/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def expected(setup: Setup, prompt: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
    """The log-probs of these tokens by a plain forward pass of the trainer's model."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = setup.policy.model(ids[:, :-1]).logits[0, len(prompt) - 1 :]
    return (logits / temperature).log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


def test_the_newest_weights_answer_with_their_version(setup: Setup) -> None:
    url, asked = address(setup), prompts(setup, 1)
    if setup.engine.version == 0:
        with pytest.raises(urllib.error.HTTPError, match="503"):  # before the first push
            generate(url, asked[0])
    for _ in range(2):
        setup.sample(asked, 2, SPEC)
        found = generate(url, asked[0])
        assert (found["policy_version"], found["model"]) == (setup.engine.version, "pushed")
        assert f"-v{setup.engine.version}-" in found["adapter"]
        tokens = found["choices"][0]["token_ids"]
        logprobs = [c["logprob"] for c in found["choices"][0]["logprobs"]["content"]]
        assert torch.tensor(logprobs) == pytest.approx(expected(setup, asked[0], tokens, 0.7), abs=1e-4)
        train(setup, 0.02)
    assert generate(url, asked[0], model="base")["policy_version"] is None


@pytest.mark.integration
def test_verifiers_train_client_samples_the_runs_policy(setup: Setup) -> None:
    from renderers import DefaultRendererConfig
    from verifiers.v1.clients.train import TrainClient
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import SamplingConfig

    setup.sample(prompts(setup, 1), 2, SPEC)
    config = TrainClientConfig(
        base_url=f"{address(setup)}/v1",
        renderer=DefaultRendererConfig(),
        renderer_model_name=str(places.nano_folder()),
    )

    async def ask() -> Any:
        client = TrainClient(config)
        try:
            wanted = SamplingConfig(temperature=0.7, max_tokens=12)
            return await client.get_response(ChatDialect(), {"model": "pushed", "messages": ASKED}, wanted)
        finally:
            await client.close()

    found = asyncio.run(ask()).tokens
    assert found.prompt_ids == setup.policy.render(ASKED)
    want = expected(setup, found.prompt_ids, found.completion_ids, 0.7)
    assert torch.tensor(found.completion_logprobs) == pytest.approx(want, abs=1e-4)


def test_a_taken_port_is_an_error_and_the_server_ends_when_its_input_is_closed(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(address(setup).rpartition(":")[2])
    config = from_mapping({**RECIPE, "sampler": {"port": port}})
    with pytest.raises(SamplingError, match=r"sampler\.port: the server did not start: .*cannot listen there"):
        samplers_of(config, setup.task, setup.engine, lambda _: None)
    assert setup.samplers is not None
    own: OwnServer = setup.samplers._close.__self__  # type: ignore[attr-defined]
    monkeypatch.setattr(own_server, "END", 120.0)
    setup.close()
    assert own.process.returncode != -signal.SIGKILL, "it did not end by itself"


@pytest.mark.parametrize(
    ("sampler", "sentence"),
    [
        ({"port": 1, "url": "http://here"}, "sampler.port: sampler.url names a sampler already"),
        ({"port": 1, "count": 2}, "sampler.count: has a meaning only with"),
        ({"port": 70000}, "sampler.port"),
    ],
)
def test_settings_that_contradict_a_port_are_refused(sampler: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EarnestError, match=sentence):
        from_mapping({**RECIPE, "sampler": sampler})
