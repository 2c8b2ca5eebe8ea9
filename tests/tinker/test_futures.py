"""The order of a model's requests, what is kept of their results, and the end of it all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tinker
import torch
from tinker import types

from earnest.serve.tinker import futures
from earnest.serve.tinker.data import Failed, JsonResult, PassOutput, SampleOutput, Sequence, Top
from earnest.serve.tinker.errors import NotThere
from earnest.serve.tinker.futures import Promise, Promises, RequestQueues
from earnest.serve.tinker.routes import LazyService
from earnest.serve.tinker.sampling import SampleQueue, SampleRequest
from tests.tinker.conftest import KEY, Served, datum


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_part_that_comes_early_waits_however_long_another_models_pass_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has not looked at the line for longer than ``GAP``; the wait begins when a request begins to wait."""
    clock = [0.0]
    monkeypatch.setattr(futures, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    queues, done, go = RequestQueues(), list[str](), threading.Event()
    promises = {name: Promise(name) for name in ("1", "2", "3", "5", "long", "other")}

    def put(line: str, seq: int | None, name: str, wait: bool = False) -> None:
        def work() -> JsonResult:
            assert not wait or go.wait(30)
            done.append(name)
            return JsonResult()

        queues.put(line, seq, promises[name], work)

    put("a", 1, "1")
    until(lambda: done == ["1"])
    put("b", 1, "long", wait=True)
    clock[0] += 2 * futures.GAP  # a long pass of another model
    put("a", 3, "3")
    go.set()
    until(lambda: "long" in done)
    put("b", 2, "other")
    until(lambda: "other" in done)  # the thread has looked at both lines since
    assert promises["3"].result is None
    put("a", 2, "2")
    until(lambda: promises["3"].result is not None)
    assert done == ["1", "long", "other", "2", "3"] and promises["3"].result == JsonResult()
    put("a", 5, "5")
    clock[0] += 1.01 * futures.GAP
    until(lambda: promises["5"].result is not None)  # and one that never comes is still missed
    said = promises["5"].result
    assert isinstance(said, Failed) and "request 4 of this model never arrived" in said.error
    queues.close()


def test_results_are_bound_by_their_bytes_and_fetched_ones_leave_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "BYTES", 1500)
    kept = Promises()

    def there() -> list[str]:
        found = []
        for name in "abcdefg":
            try:
                found.append(kept.get(name).id)
            except NotThere:
                continue
        return found

    for name in "abc":
        kept.make(name)[0].set(PassOutput((torch.zeros(60), torch.zeros(40, 1)), {}))
    kept.get("b").fetched = True
    waiting, _ = kept.make("d")
    assert there() == ["a", "b", "c", "d"]
    kept.make("e")[0].set(PassOutput((torch.zeros(100),), {}))
    assert there() == ["a", "c", "d", "e"]
    kept.make("f")[0].set(PassOutput((torch.zeros(9000),), {}))  # more than all may have: it alone can be fetched
    assert there() == ["d", "f"] and waiting.result is None
    waiting.set(JsonResult())
    assert there() == ["d"]


def test_the_size_of_a_sample_is_that_of_its_content() -> None:
    top = Top(torch.zeros(7, 50, dtype=torch.long), torch.zeros(7, 50), (True,) * 7)
    plain = Sequence((1, 2, 3), (0.0, 0.0, 0.0), "stop")
    small = futures.size(SampleOutput((plain,)))
    assert small == 6 * 32
    assert futures.size(SampleOutput((plain,), top_prompt=top)) == small + 7 * 50 * 12
    assert futures.size(SampleOutput((Sequence((1, 2, 3), (0.0,) * 3, "stop", top),))) == small + 7 * 50 * 12
    assert futures.size(SampleOutput((plain,), alternatives=(top.ids, top.logprobs))) == small + 7 * 50 * 12


def test_a_result_that_went_out_counts_as_fetched(served: Served) -> None:
    (later,) = [m for c in served.host.after_load if isinstance(m := getattr(c, "__self__", None), LazyService)]
    assert later.service is not None
    client: tinker.TrainingClient = served.training(rank=1)
    client.forward([datum([5, 6, 7])], "cross_entropy").result()
    own = [p for p in later.service.promises._all.values() if p.id.startswith(client.model_id)]
    assert own and all(p.fetched for p in own) and any(p.size == 8 for p in own)


def test_samples_that_wait_are_failed_when_the_server_ends(served: Served) -> None:
    samples = SampleQueue(served.host)
    prompt = types.ModelInput.from_ints([5, 6, 7]).model_dump(mode="json")
    body = {"prompt": prompt, "sampling_params": {"max_tokens": 1}, "prompt_logprobs": True}
    promises = [Promise(str(i)) for i in range(6)]
    with served.host.turn("tinker"):  # nobody is scored while this is held
        for promise in promises[:5]:
            samples.put(promise, SampleRequest.read(body), "base", None)
        until(lambda: samples._jobs.qsize() == 4)
        closing = threading.Thread(target=samples.close)
        closing.start()
        until(samples._stopping.is_set)
    closing.join()
    until(lambda: promises[0].result is not None)
    assert isinstance(promises[0].result, SampleOutput)
    samples.put(promises[5], SampleRequest.read(body), "base", None)
    said = [p.result for p in promises[1:]]
    assert said == [Failed("the server is shutting down.", "server")] * 5


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("load_weights", {"path": "tinker://nowhere/weights/x"}),
        ("load_weights", {"path": f"tinker://{'a' * 32}:train:0/sampler_weights/x"}),
        ("load_weights", {}),
        ("optim_step", {}),
        ("save_weights", {"path": "../x"}),
        ("forward_backward", {"forward_backward_input": {"data": [{}], "loss_fn": "cross_entropy"}}),
        ("forward_backward", {}),
    ],
)
def test_a_refused_request_does_not_hold_up_the_next_one(served: Served, path: str, body: dict[str, Any]) -> None:
    """``GAP`` is 120 s: without its number the next request would wait that long and fail."""
    client = served.training(rank=1)
    number = 1
    sent = {"model_id": client.model_id, "seq_id": number, **body}
    with httpx.Client(base_url=f"{served.url}/api/v1", headers={"X-API-Key": KEY}, timeout=60) as http:
        refused = http.post(path, json=sent)
        if refused.status_code == 200:  # accepted, and it fails as a future
            result = http.post("retrieve_future", json={"request_id": refused.json()["request_id"]}).json()
            assert result["category"] == "user", result
        else:
            assert refused.status_code in (400, 404) and refused.json()["detail"]
        begun = time.monotonic()
        save = http.post("save_weights", json={"model_id": client.model_id, "seq_id": number + 1, "path": "next"})
        result = http.post("retrieve_future", json={"request_id": save.json()["request_id"]}).json()
    assert result.get("path") == f"tinker://{client.model_id}/weights/next" and time.monotonic() - begun < 30


@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
def test_a_load_that_the_sdk_is_refused_leaves_its_client_usable(served: Served) -> None:
    client = served.training(rank=1)
    with pytest.raises(tinker.TinkerError, match="load a state"):
        client.load_state(f"tinker://{'a' * 32}:train:0/sampler_weights/x").result()
    assert client.save_state("after").result(timeout=60).path.endswith("/weights/after")


def test_requests_that_are_nested_deeply_are_refused(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    client = served.training(rank=1)
    deep = "[" * 100_000 + "]" * 100_000
    with httpx.Client(base_url=f"{served.url}/api/v1", headers={"X-API-Key": KEY}, timeout=60) as http:
        for path in ("create_session", "create_model", "optim_step", "asample", "forward_backward", "retrieve_future"):
            for content in (deep, f'{{"model_id": "{client.model_id}", "user_metadata": {deep}}}'):
                answer = http.post(path, content=content, headers={"Content-Type": "application/json"})
                assert answer.status_code == 400 and answer.json()["detail"], (path, answer.text)
    assert "Traceback" not in capfd.readouterr().err


def test_a_sample_that_finds_the_queue_full_is_given_up_when_the_server_ends(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    from earnest.serve.decode import QueueFull

    tries = []

    def full(request: Any) -> None:
        tries.append(request)
        if len(tries) == 3:
            samples._stopping.set()
        raise QueueFull("full")

    samples = SampleQueue(served.host)
    monkeypatch.setattr(served.host.decoder, "submit", full)
    with pytest.raises(QueueFull):
        samples._submit(None)
    assert len(tries) == 3
