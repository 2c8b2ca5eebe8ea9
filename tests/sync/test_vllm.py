"""A real vLLM as the sampler of a run, and under the contract. `make vllm` runs these tests; docs/sampler.md has their
verdicts."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from earnest.adapters import LoRA, attach
from earnest.config import from_mapping
from earnest.engines import LocalEngine
from earnest.engines.base import Rollout
from earnest.errors import SamplingError
from earnest.models import SampleSpec, load
from earnest.runs import replay, start
from earnest.runs.errors import RunStopped
from earnest.runs.setup import Setup, build
from earnest.sync.base import Weights
from earnest.sync.contract import audit_sampler
from earnest.sync.server import Server
from scripts.vllm_server import Vllm
from tests.sync.faults import FAULTS
from tests.sync.served import proxied
from tests.sync.test_contract import RECIPE
from tests.sync.test_servers import prompts, sampler, train, updated_under_way

pytestmark = pytest.mark.vllm
SPEC = SampleSpec(max_new_tokens=6, temperature=0.7, seed=3)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    made = Vllm(tmp_path_factory.mktemp("vllm"))
    yield made
    made.stop()


@pytest.fixture
def local() -> Setup:
    return build(from_mapping(RECIPE), lambda _: None)


def own(setup: Setup, found: list[Rollout], temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(the sampler's log-probs, those of a plain forward pass here)."""
    theirs, ours = [], []
    for r in found:
        ids = torch.tensor([[*r.prompt, *r.tokens]])
        with torch.no_grad():
            logits = setup.policy.model(ids[:, :-1]).logits[0, len(r.prompt) - 1 :]
        ours.append((logits / temperature).log_softmax(-1).gather(-1, ids[0, len(r.prompt) :, None])[:, 0])
        theirs.append(torch.tensor(r.logprobs))
    return torch.cat(theirs), torch.cat(ours)


def call(vllm: Vllm, path: str, method: str = "POST") -> str:
    with urllib.request.urlopen(urllib.request.Request(vllm.url + path, method=method)) as answer:
        return str(answer.read().decode())


def counted(vllm: Vllm, name: str) -> float:
    lines = call(vllm, "/metrics", "GET").splitlines()
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(f"vllm:{name}"))


def hits(vllm: Vllm) -> float:
    return counted(vllm, "prefix_cache_hits_total")


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_rollouts_of_every_version_are_the_trainers_own(vllm: Vllm, local: Setup, temperature: float) -> None:
    """Push and probe over three versions, more completions than one request has, ends at the policy's own tokens."""
    remote, spec = sampler(local, vllm.url, folder=str(vllm.loras)), replace(SPEC, temperature=temperature)
    for _ in range(3):
        cut_off = remote.sample(prompts(local, 3), 4, replace(spec, max_new_tokens=2))
        assert any(r.finish == "length" and len(r.tokens) == 2 for r in cut_off)
        found = remote.sample(prompts(local, 3), 20, spec)
        assert [(r.prompt_index, r.sample_index) for r in found] == [(i, k) for i in range(3) for k in range(20)]
        assert {r.policy_version for r in found} == {local.engine.version}
        theirs, ours = own(local, found, temperature)
        assert theirs == pytest.approx(ours, abs=1e-4)
        assert all((r.tokens[-1] in local.policy.eos_ids) == (r.finish == "stop") for r in found)
        assert any(r.finish == "stop" for r in found)
        assert len({r.tokens for r in found[:20]}) > 1, "the completions of one prompt are draws of their own"
        assert remote.metrics["sampler/probe"] < 1e-4 and remote.metrics["sampler/behaviour"] < 1e-4
        train(local, 0.05)
    remote.close()
    assert list(vllm.loras.iterdir()) == []


def test_prompts_whose_prefix_is_cached_are_computed_on_new_weights(vllm: Vllm, local: Setup) -> None:
    remote = sampler(local, vllm.url, folder=str(vllm.loras))
    long = [t for p in prompts(local, 6) for t in p][:160]
    for _ in range(3):
        before = hits(vllm)
        for _ in range(2):
            found = remote.sample([long], 4, SPEC)
            theirs, ours = own(local, found, SPEC.temperature)
            assert theirs == pytest.approx(ours, abs=1e-4)
        assert hits(vllm) > before, "the cache was used"
        train(local, 0.05)
    remote.close()


def test_adapters_are_swapped_under_load(vllm: Vllm, local: Setup) -> None:
    """Threads sample one version without a pause while the next one is pushed and the one before is unloaded."""
    server, names = Server(vllm.url, folder=str(vllm.loras)), [f"load-{i}" for i in range(3)]
    ends, prompt = local.policy.eos_ids, prompts(local, 1)[0]
    made: list[tuple[str, Weights]] = []
    for name in names:
        train(local, 0.05)
        weights = Weights.of(local.engine)
        weights.files(plain=True)
        made.append((name, weights))
    stop, answers = threading.Event(), []

    def ask(name: str, number: int) -> None:
        seed = 0
        while not stop.is_set():
            for c in server.complete(name, prompt, 2, replace(SPEC, seed=1000 * number + seed), ends):
                answers.append((name, Rollout(0, 0, tuple(prompt), c.tokens, c.logprobs, "stop", 0, 0.7)))
            seed += 1

    server.load(*made[0])
    with ThreadPoolExecutor(4) as pool:
        first = [pool.submit(ask, names[0], i) for i in range(2)]
        while len(answers) < 8:
            time.sleep(0.05)
        server.load(*made[1])
        second = [pool.submit(ask, names[1], i) for i in range(2)]
        seen = len(answers)
        while len(answers) < seen + 16:
            time.sleep(0.05)
        stop.set()
        for task in [*first, *second]:
            task.result()
    server.unload(names[0])
    server.load(*made[2])
    for c in server.complete(names[2], prompt, 4, SPEC, ends):
        answers.append((names[2], Rollout(0, 0, tuple(prompt), c.tokens, c.logprobs, "stop", 0, 0.7)))
    for name, weights in made:
        local.adapter.load_state_dict(weights.state)  # type: ignore[attr-defined]
        rows = [r for n, r in answers if n == name]
        theirs, ours = own(local, rows, 0.7)
        assert rows and theirs == pytest.approx(ours, abs=1e-4)
    for name in names[1:]:
        server.unload(name)


def test_a_pause_holds_requests_and_loses_none(vllm: Vllm, local: Setup) -> None:
    remote = sampler(local, vllm.url, folder=str(vllm.loras))
    expected = [r.tokens for r in remote.sample(prompts(local), 2, SPEC)]
    call(vllm, "/pause?mode=keep")
    try:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(remote.sample, prompts(local), 2, SPEC)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=2)
            call(vllm, "/resume")
            assert [r.tokens for r in waiting.result(timeout=300)] == expected
    finally:
        call(vllm, "/resume")
    remote.close()


def test_completions_under_way_continue_with_new_weights(vllm: Vllm, local: Setup) -> None:
    """In-flight updates: /pause ends the requests under way with the tokens that they have; they continue after
    /resume with the new adapter."""
    before = counted(vllm, "generation_tokens_total")
    updated_under_way(
        local, vllm.url, lambda: counted(vllm, "generation_tokens_total") > before + 64, folder=str(vllm.loras)
    )
    assert json.loads(call(vllm, "/is_paused", "GET")) == {"is_paused": False}
    assert list(vllm.loras.iterdir()) == []


def test_the_probe_finds_that_the_cpu_build_takes_a_part_of_new_base_weights(vllm: Vllm) -> None:
    """Full-parameter training: vLLM 0.32 on a CPU answers `reload_weights` with success and applies a part of the
    weights. The probe after the push stops the run, and at the end the server has its own weights again."""
    full = {"adapter": {"kind": "full"}, "optimizer": {"kind": "adamw", "lr": 1e-3}}
    local = build(from_mapping({**RECIPE, **full}), lambda _: None)
    remote = sampler(local, vllm.url, folder=str(vllm.loras))
    server, row = Server(vllm.url), prompts(local)[0]
    before = server.score(server.base, row)
    remote.sample([row], 2, SPEC)  # the first version is the base
    train(local, 0.01)
    with pytest.raises(SamplingError, match=r"off the trainer on the probe of version 1 .* other weights"):
        remote.sample([row], 2, SPEC)
    remote.close()
    assert server.score(server.base, row) == pytest.approx(before, abs=1e-5)
    assert list(vllm.loras.iterdir()) == []


def test_full_weights_arrive_where_layers_read_the_weights_themselves(tmp_path: Path) -> None:
    """Without oneDNN's packed copies, which `reload_weights` does not renew, every weight of a version arrives: with
    them the log-probs of the same two versions are off (the test above)."""
    live = Vllm(tmp_path / "vllm", live=True)
    try:
        full = {"adapter": {"kind": "full"}, "optimizer": {"kind": "adamw", "lr": 1e-3}}
        local = build(from_mapping({**RECIPE, **full}), lambda _: None)
        remote = sampler(local, live.url, folder=str(live.loras))
        server, row = Server(live.url), prompts(local)[0]
        before = server.score(server.base, row)
        for _ in range(2):
            train(local, 0.01)
            theirs, ours = own(local, remote.sample([row], 2, SPEC), SPEC.temperature)
            assert theirs.tolist() == pytest.approx(ours.tolist(), abs=1e-4)
        remote.close()
        assert server.score(server.base, row) == pytest.approx(before, abs=1e-5)
    finally:
        live.stop()


def test_a_run_trains_with_it(vllm: Vllm, tmp_path: Path) -> None:
    more = {"sampler": {"url": vllm.url, "folder": str(vllm.loras)}, "out": str(tmp_path / "run")}
    start("vllm", from_mapping({**RECIPE, **more}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if line["kind"] == "step"]
    assert len(steps) == 3 and all(m["sampler/probe"] < 1e-4 and m["sampler/behaviour"] < 1e-4 for m in steps)


@pytest.mark.parametrize("partial", ["finish", "continue"])
def test_it_samples_while_the_trainer_trains_and_the_run_replays(vllm: Vllm, tmp_path: Path, partial: str) -> None:
    """Bit for bit from the record, without the server."""
    sampler_ = {"url": vllm.url, "folder": str(vllm.loras), "staleness": 1, "partial": partial}
    run = start("vllm", from_mapping({**RECIPE, "steps": 4, "sampler": sampler_, "out": str(tmp_path / "run")})).folder
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if line["kind"] == "step"]
    assert all(m["sampler/age_max"] <= 1 and m["sampler/behaviour"] < 1e-4 for m in steps)
    again = replay(run, [f"out={tmp_path / 'again'}"]).folder
    name = Path("adapter") / "adapter_model.safetensors"
    assert (again / name).read_bytes() == (run / name).read_bytes()
    assert list(vllm.loras.iterdir()) == []


def test_a_reused_name_is_right_after_its_cache_is_cleared(vllm: Vllm, local: Setup) -> None:
    """The fault of this version that the contract names, and the way out of it."""
    server, prompt = Server(vllm.url, folder=str(vllm.loras)), [t for p in prompts(local, 6) for t in p][:160]
    offs = []
    for cleared in (False, True):
        server_name = f"reused-{cleared}"
        for _ in range(2):
            train(local, 0.1)
            server.load(server_name, Weights.of(local.engine))
            if cleared:
                call(vllm, "/reset_prefix_cache")
            found = server.complete(server_name, prompt, 2, SPEC, local.policy.eos_ids)
            server.unload(server_name)
        rows = [Rollout(0, 0, tuple(prompt), c.tokens, c.logprobs, "stop", 0, 0.7) for c in found]
        theirs, ours = own(local, rows, 0.7)
        offs.append(float((theirs - ours).abs().mean()))
    assert offs[0] > 1e-3 and offs[1] < 1e-4, offs


def test_another_model_is_found_at_the_first_push(vllm: Vllm, local: Setup) -> None:
    with torch.no_grad():
        local.policy.model.model.embed_tokens.weight.mul_(1.1)  # type: ignore[attr-defined]
    remote = sampler(local, vllm.url, folder=str(vllm.loras))
    with pytest.raises(SamplingError, match=r"off the trainer on the probe of version 0 .*; it runs other weights"):
        remote.sample(prompts(local), 1, SPEC)
    remote.close()


def test_the_contract_holds_but_for_two_known_faults_of_this_version(vllm: Vllm) -> None:
    """vLLM 0.32.0 on the CPU: its prefix cache is keyed by the adapter's name, and requests for the base model in a
    batch with adapters are computed with one of them. A run meets neither: every version has a name of its own, and
    nothing samples the base."""
    policy = load("nano")
    engine = LocalEngine(policy, attach(policy, LoRA(rank=8)))
    found = audit_sampler(Server(vllm.url, folder=str(vllm.loras)), engine)
    assert {f.law for f in found.failures} == {"reused name", "base isolation"}, str(found)
    assert {f.outcome for f in found.findings} == {"holds", "fails"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_by_the_contract_and_stops_a_run(vllm: Vllm, fault: str, tmp_path: Path) -> None:
    plant, law, sentence = FAULTS[fault]
    policy = load("nano")
    engine = LocalEngine(policy, attach(policy, LoRA(rank=4), targets=["q_proj", "v_proj"]))
    with proxied(vllm.url) as proxy:
        plant(proxy)
        found = audit_sampler(Server(proxy.url, folder=str(vllm.loras)), engine, laws=(law,))
        assert found.failures and {f.law for f in found.failures} <= {law, "reused name"}, str(found)
        assert found.failures[0].law == law
    with proxied(vllm.url) as proxy:
        plant(proxy)
        more: dict[str, Any] = {"sampler": {"url": proxy.url, "folder": str(vllm.loras)}, "out": str(tmp_path / "run")}
        with pytest.raises(RunStopped, match=sentence):
            start("planted", from_mapping({**RECIPE, **more}))
    for model in Server(vllm.url).models()[1:]:  # whose unload was swallowed
        Server(vllm.url, folder=str(vllm.loras)).unload(str(model["id"]))


def test_a_server_that_was_started_again_gets_the_weights_again(vllm: Vllm, local: Setup) -> None:
    """Last, since it replaces the server's process."""
    remote = sampler(local, vllm.url, folder=str(vllm.loras))
    train(local, 0.05)
    expected = [r.tokens for r in remote.sample(prompts(local), 2, SPEC)]
    vllm.stop()
    vllm.start()
    assert [r.tokens for r in remote.sample(prompts(local), 2, SPEC)] == expected
    assert remote.metrics["sampler/restarts"] == 1 and remote.metrics["sampler/probe"] < 1e-4
    remote.close()
