"""Training here, sampling on a real `earnest serve`: exact tokens, every version pushed and probed, none stale."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from earnest.config import dump, from_mapping
from earnest.engines.base import Rollout
from earnest.errors import ConfigError, EarnestError, SamplingError
from earnest.models import SampleSpec
from earnest.runs import start
from earnest.runs.errors import RunStopped
from earnest.runs.sampling import samplers_of
from earnest.runs.setup import Setup, build
from earnest.sync.base import Interruptible, Weights
from earnest.sync.partial import PartialSampling
from earnest.sync.pool import SamplerPool
from earnest.sync.probe import TOLERANCE, Target
from earnest.sync.server import Server, already_gone, already_loaded
from tests.sync.served import proxied, served, speak, swallow_pushes

RECIPE: dict[str, Any] = {
    "model": "nano",
    "task": "sort",
    "adapter": {"kind": "lora", "rank": 4, "targets": ["q_proj", "v_proj"]},
    "objective": [{"kind": "grpo"}],
    "sampling": {"prompts_per_step": 2, "completions_per_prompt": 4, "max_new_tokens": 6},
    "optimizer": {"kind": "adamw", "lr": 2e-3},
    "eval": {"every": 0, "prompts": 2, "samples": 2},
    "steps": 2,
    "threads": 1,
}
SPEC = SampleSpec(max_new_tokens=5, temperature=0.7, seed=3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("elsewhere") / "data") as url:
        yield url


@pytest.fixture(scope="module")
def made() -> Setup:
    return build(from_mapping(RECIPE), lambda _: None)


@pytest.fixture
def local(made: Setup) -> Iterator[Setup]:
    """The trainer, with the initial weights again after each test, as a new version."""
    before = [tensor.detach().clone() for tensor in made.adapter.parameters()]
    yield made
    with torch.no_grad():
        for tensor, value in zip(made.adapter.parameters(), before, strict=True):
            tensor.copy_(value)
    made.engine.version += 1


def sampler(setup: Setup, url: str, **more: Any) -> SamplerPool:
    config = from_mapping({**RECIPE, "sampler": {"url": url, **more}})
    made = samplers_of(config, setup.task, setup.engine, lambda _: None)
    assert made is not None
    return made


def train(setup: Setup, size: float) -> None:
    """A step of this size, whatever its direction."""
    with torch.no_grad():
        for tensor in setup.adapter.parameters():
            tensor.add_(size * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(setup.engine.version)))
    setup.engine.version += 1


def prompts(setup: Setup, count: int = 2) -> list[list[int]]:
    return [list(setup.policy.render(p.messages)) for p in setup.task.prompts("train", count, 1)]


def names(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        return [m["id"] for m in json.loads(answer.read())["data"] if m["id"].startswith("earnest-")]


def test_rollouts_are_the_trainers_own(server: str, local: Setup) -> None:
    """Of every version: the tokens' log-probs equal a plain forward pass of the trainer's model here, at temperature;
    equal prompts get draws of their own; the server holds one version at a time, and none when the run is over."""
    remote = sampler(local, server)
    asked = prompts(local, 3)
    for step in range(2):
        found = remote.sample(asked, 3, SPEC)
        assert [(r.prompt_index, r.sample_index) for r in found] == [(i, k) for i in range(3) for k in range(3)]
        assert {r.policy_version for r in found} == {local.engine.version}
        for r in found:
            ids = torch.tensor([[*r.prompt, *r.tokens]])
            with torch.no_grad():
                logits = local.policy.model(ids[:, :-1]).logits[0, len(r.prompt) - 1 :]
            want = (logits / SPEC.temperature).log_softmax(-1).gather(-1, ids[0, len(r.prompt) :, None])[:, 0]
            assert torch.tensor(r.logprobs) == pytest.approx(want, abs=1e-4)
            assert (r.tokens[-1] in local.policy.eos_ids) == (r.finish == "stop")
        (name,) = names(server)
        assert f"-v{local.engine.version}-" in name
        assert remote.metrics["sampler/probe"] < 1e-5 and remote.metrics["sampler/behaviour"] < 1e-5
        assert (remote.metrics["sampler/moved"] > 1e-3) == (step == 1)
        train(local, 0.02)
    drawn = remote.sample([asked[0]] * 2, 8, replace(SPEC, temperature=2.0))
    assert [r.tokens for r in drawn[:8]] != [r.tokens for r in drawn[8:]], "one seed for all would give these twice"
    remote.close()
    assert names(server) == []


def updated_under_way(setup: Setup, url: str, sampling: Callable[[], bool], **more: Any) -> list[Rollout]:
    """32 completions of which the server has sampled the first tokens (``sampling``) when new weights arrive. Each
    token's log-prob is that of the version which it names, by the trainer's own computation."""
    train(setup, 0.2)  # from here on hardly a completion ends early
    pool = sampler(setup, url, staleness=2, partial="continue", **more)
    link, old = pool.links[0], pool.target()
    assert isinstance(link.sampler, Interruptible) and link.sampler.interrupts
    link.sync(old)
    train(setup, 0.05)
    new, arrived = pool.target(), []

    def newest() -> Target:
        if not arrived and sampling():
            arrived.append(new)
        return arrived[0] if arrived else old

    spec = SampleSpec(max_new_tokens=96, temperature=1.5, seed=3)
    found = PartialSampling(link, old, newest, restart=False)(prompts(setup), 16, spec)
    assert [(r.prompt_index, r.sample_index) for r in found] == [(i, k) for i in range(2) for k in range(16)]
    assert {r.prompt for r in found} == {tuple(p) for p in prompts(setup)}
    for r in found:
        assert (len(r.tokens) == 96) if r.finish == "length" else (r.tokens[-1] in setup.policy.eos_ids)
        assert sum(length for length, _ in r.spans) == len(r.tokens) == len(r.logprobs)
    first, second = old.weights.version, new.weights.version
    both = [r for r in found if r.continued]
    assert both and all([version for _, version in r.continued] == [first, second] for r in both)
    assert len({r.tokens for r in found}) == len(found), "completions have draws of their own"
    pool.accept(found, [r for r in found if len(r.tokens) > 0], spec, first)
    assert pool.metrics["sampler/behaviour"] < 1e-4
    pool.close()
    return found


def test_completions_under_way_continue_with_new_weights(
    server: str, local: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends what it samples and keeps the tokens: one request for each prompt before, one for each
    completion that has tokens after, and no slices. A prompt that was still queued is requested as before."""
    monkeypatch.setattr("earnest.sync.servers.LOOK", 0.01)

    def sampling() -> bool:
        with urllib.request.urlopen(f"{server}/health") as answer:
            return bool(json.loads(answer.read())["chat"]["running"])

    with proxied(server) as proxy:
        sent: list[dict[str, Any]] = []

        def before(path: str, body: bytes) -> tuple[str, bytes]:
            sent.extend([json.loads(body)] if path == "/v1/completions" else [])
            return path, body

        proxy.before = before
        found = updated_under_way(local, proxy.url, sampling)
        assert any(path == "/v1/abort_lora_adapter" for path, _ in proxy.seen)
        sampled = [body for body in sent if not body.get("echo")]
        left = [96 - r.continued[0][0] for r in found if r.continued]
        assert [body["max_tokens"] for body in sampled[:2]] == [96, 96]
        again = [body["max_tokens"] for body in sampled[2:]]
        assert sorted(n for n in again if n < 96) == sorted(n for n in left if n < 96) != []


def test_a_recipe_trains_with_it(server: str, tmp_path: Path) -> None:
    start("elsewhere", from_mapping({**RECIPE, "sampler": server, "out": str(tmp_path / "run")}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert len(steps) == 2
    assert all(0 < line["metrics"]["sampler/probe"] < 1e-5 for line in steps)
    assert [line["metrics"]["sampler/version"] for line in steps] == [0, 1], "each step's rollouts are the server's"
    assert names(server) == []


@pytest.mark.parametrize("size", [2e-4, 0.02], ids=["small steps", "large steps"])
def test_a_sampler_that_ignores_the_push_stops_the_run(server: str, local: Setup, size: float) -> None:
    """It says 200 to the push and answers under the new name, with the weights of before. Also where a step moves the
    probe by less than the tolerance: then what was before is still nearer."""
    with proxied(server) as proxy:
        swallow_pushes(proxy, rename=True)
        remote = sampler(local, proxy.url)
        remote.sample(prompts(local), 1, SPEC)
        held = names(server)
        train(local, size)
        with pytest.raises(SamplingError, match="still runs old weights: after the push of version") as error:
            remote.sample(prompts(local), 1, SPEC)
        moved = float(str(error.value).split(" nats per token")[0].rsplit(" ", 1)[1])
        assert (moved < TOLERANCE[torch.float32]) == (size < 1e-3)
        assert names(server) == held
        proxy.before = lambda path, body: (path, body)
        remote.close()


def test_a_run_with_such_a_sampler_stops_with_the_reason(server: str, tmp_path: Path) -> None:
    """The whole run, not the sampler alone: it ends at the step after the first update, and its folder has the
    reason."""
    with proxied(server) as proxy:
        swallow_pushes(proxy, rename=True)
        config = from_mapping({**RECIPE, "steps": 6, "sampler": proxy.url, "out": str(tmp_path / "run")})
        with pytest.raises(RunStopped, match=r"stopped in step [2-6] of 6: the sampler at .* still runs old weights"):
            start("elsewhere", config)
        pushed = [path for path, _ in proxy.seen if path.startswith("/v1/upload_lora_adapter")]
        assert len(pushed) == 2  # the one that was taken, the one that was swallowed, and none after it
        proxy.before = lambda path, body: (path, body)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "failed" and "still runs old weights" in record["reason"]
    assert record["steps_done"] < 6 and not (tmp_path / "run" / "adapter").exists()
    for name in names(server):  # whose unload was swallowed, too
        body = json.dumps({"lora_name": name}).encode()
        headers = {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{server}/v1/unload_lora_adapter", body, headers)).close()


def test_a_push_that_was_not_applied_is_found(server: str, local: Setup) -> None:
    with proxied(server) as proxy:
        swallow_pushes(proxy, rename=False)
        remote = sampler(local, proxy.url)
        remote.sample(prompts(local), 1, SPEC)
        train(local, 0.02)
        with pytest.raises(SamplingError, match="HTTP 404: there is no adapter 'earnest-"):
            remote.sample(prompts(local), 1, SPEC)
        proxy.before = lambda path, body: (path, body)
        remote.close()


@pytest.mark.parametrize(("kind", "lost"), [("earnest", "502"), ("earnest", "cut"), ("vllm", "cut"), ("sglang", "502")])
def test_a_push_and_an_unload_whose_answers_get_lost_are_done(
    kind: str, lost: Any, server: str, local: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were carried out; sent again, the server says that the name is there, or gone. The run goes on, and the
    probe has seen the weights."""
    monkeypatch.setattr("earnest.http.time", SimpleNamespace(sleep=lambda _: None))
    with proxied(server) as proxy:
        if kind != "earnest":
            speak(proxy, kind)
        if kind == "sglang":  # which says 400 for both
            proxy.refuse = {409: 400}
        remote = sampler(local, proxy.url, **({} if kind == "earnest" else {"folder": str(tmp_path)}))
        sent: list[str] = []

        def lose(path: str) -> Any:
            sent.append(path.split("?")[0].rsplit("/", 1)[1])
            return lost if "lora_adapter" in path and sent.count(sent[-1]) % 2 else None

        proxy.lose = lose
        for _ in range(2):
            train(local, 0.02)
            assert len(remote.sample(prompts(local), 1, SPEC)) == 2
            (name,) = names(server)
            assert f"-v{local.engine.version}-" in name and remote.metrics["sampler/probe"] < 1e-5
        remote.close()
        assert names(server) == []
        push = "upload_lora_adapter" if kind == "earnest" else "load_lora_adapter"
        assert (sent.count(push), sent.count("unload_lora_adapter")) == (4, 4)


def test_a_name_that_is_taken_before_the_first_push_is_refused(server: str, local: Setup) -> None:
    """Somebody else's: only a push that was sent before can find its own name there."""
    remote, weights = Server(server), Weights.of(local.engine)
    remote.load("earnest-twice", weights)
    with pytest.raises(SamplingError, match="HTTP 409: there is an adapter 'earnest-twice' already"):
        remote.load("earnest-twice", weights)
    remote.unload("earnest-twice")
    remote.unload("earnest-twice")  # one that is gone already is not an error
    assert names(server) == []


@pytest.mark.parametrize(
    ("says", "done"),
    [
        (lambda: already_gone(400, "LoRA with name x does not exist. Loaded LoRAs: dict_keys([])", True), True),
        (lambda: already_gone(400, "LoRA with name x does not exist. Loaded LoRAs: dict_keys([])", False), False),
        (lambda: already_gone(400, "LoRA is not enabled.", True), False),
        (lambda: already_loaded(400, "The lora adapter 'x' has already been loaded.", True), True),
        (lambda: already_loaded(400, "rank 64 is greater than max_lora_rank 16", True), False),
        (lambda: already_loaded(500, "already out of memory", True), False),
    ],
)
def test_each_servers_answers_for_loaded_and_unloaded_are_recognised(says: Any, done: bool) -> None:
    """SGLang's and vLLM's sentences, as their sources have them."""
    assert says() is done


def _choices(change: Any) -> Any:
    """Change the sampled choices of a completion; those of a probe (echo) stay."""

    def after(path: str, found: Any) -> Any:
        for choice in found["choices"] if path == "/v1/completions" and "prompt_token_ids" in found else ():
            change(choice)
        return found

    return after


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: c.pop("token_ids"), "gives no exact token ids"),
        (lambda c: c.update(logprobs=None), "gives no log-prob for each token"),
        (lambda c: c["logprobs"]["token_logprobs"].pop(), "gives no log-prob for each token"),
        (
            lambda c: c["logprobs"].update(token_logprobs=[0.7 * v for v in c["logprobs"]["token_logprobs"]]),
            "--logprobs-mode processed_logprobs",
        ),
        (lambda c: c.update(prompt_token_ids=[1, 2]), "another prompt than the tokens"),
        (lambda c: c["token_ids"].pop() and c["logprobs"]["token_logprobs"].pop(), "ended a completion of"),
    ],
)
def test_what_is_not_exact_is_refused(server: str, local: Setup, change: Any, sentence: str) -> None:
    with proxied(server) as proxy:
        proxy.after = _choices(change)
        remote = sampler(local, proxy.url)
        with pytest.raises(SamplingError, match=sentence):
            remote.sample(prompts(local), 2, SPEC)
        remote.close()


def test_other_base_weights_are_found_at_the_first_push(server: str) -> None:
    setup = build(from_mapping(RECIPE), lambda _: None)
    with torch.no_grad():
        setup.policy.model.model.embed_tokens.weight.mul_(1.1)
    remote = sampler(setup, server)
    with pytest.raises(SamplingError, match=r"off the trainer on the probe of version 0 .*; it runs other weights"):
        remote.sample(prompts(setup), 1, SPEC)
    remote.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_requests_have_the_format_of_vllm_and_sglang(kind: str, server: str, local: Setup, tmp_path: Path) -> None:
    """A plain LoRA in the common folder, loaded by its path; every setting is spelled out; the folder is left clean."""
    with proxied(server) as proxy:
        bodies = speak(proxy, kind)
        with pytest.raises(ConfigError, match=rf"sampler\.folder: {kind} reads adapters from a folder"):
            sampler(local, proxy.url)
        remote = sampler(local, f"{proxy.url}/v1/", folder=str(tmp_path))
        assert len(remote.sample(prompts(local), 2, SPEC)) == 4
        assert remote.metrics["sampler/probe"] < 1e-5
        push, *_ = bodies
        assert set(push) == {"lora_name", "lora_path"} and Path(push["lora_path"]).parent == tmp_path
        asked = bodies[-1]
        assert (asked["top_k"], asked["min_p"], asked["repetition_penalty"]) == (-1, 0.0, 1.0)
        assert asked["stop_token_ids"] == sorted(local.policy.eos_ids)
        remote.close()
        assert list(tmp_path.iterdir()) == []


def test_the_key_is_sent_and_not_stored(
    server: str, local: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "tml-secret")
    with proxied(server) as proxy:
        remote = sampler(local, proxy.url, key="MY_KEY")
        remote.sample(prompts(local), 1, SPEC)
        remote.close()
        assert {key for _, key in proxy.seen} == {"Bearer tml-secret"}
    config = from_mapping({**RECIPE, "sampler": {"url": proxy.url, "key": "MY_KEY"}})
    assert "tml-secret" not in dump(config)


def test_a_server_that_cannot_sample_is_refused_by_name(
    server: str, local: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("earnest.http.time", SimpleNamespace(sleep=lambda _: None))
    with proxied(server) as proxy:
        proxy.after = lambda _, found: {"data": [{**found["data"][0], "owned_by": "somebody"}]}
        with pytest.raises(SamplingError, match="belong to 'somebody'; adapters can be pushed to earnest, vllm,"):
            sampler(local, proxy.url)
        gone = proxy.url
    with pytest.raises(SamplingError, match="Is it running"):
        sampler(local, gone)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"sampler": "ftp://here"}, "sampler"),
        ({"sampler": "http://name:secret@here"}, "sampler"),
        ({"sampler": "http://here", "sampling": {"workers": 2}}, "leave one of the two out"),
        ({"sampler": "http://here", "engine": {"kind": "tinker"}}, "samples itself"),
    ],
)
def test_contradictory_sampler_settings_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(EarnestError, match=sentence):
        from_mapping({**RECIPE, **given})
    assert from_mapping({**RECIPE, "sampler": "http://here:1"}).sampler.url == "http://here:1"  # type: ignore[union-attr]
