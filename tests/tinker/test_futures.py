"""The order of a model's requests, what is kept of their results, and the end of it all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import tinker
import torch
from tinker import types

from earnest.serve.tinker import futures
from earnest.serve.tinker.data import Failed, PassOutput, Plain, SampleOutput, Sequence, Top
from earnest.serve.tinker.errors import NotThere
from earnest.serve.tinker.futures import Lines, Promise, Promises
from earnest.serve.tinker.routes import Later
from earnest.serve.tinker.sampling import SampleQueue, SampleRequest
from tests.tinker.conftest import Served, datum


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_part_that_comes_early_waits_however_long_another_models_pass_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread has not looked at the line for longer than ``GAP``; the wait begins when a request begins to wait."""
    clock = [0.0]
    monkeypatch.setattr(futures, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    lines, done, go = Lines(), list[str](), threading.Event()
    promises = {name: Promise(name) for name in ("1", "2", "3", "5", "long", "other")}

    def put(line: str, seq: int | None, name: str, wait: bool = False) -> None:
        def work() -> Plain:
            assert not wait or go.wait(30)
            done.append(name)
            return Plain()

        lines.put(line, seq, promises[name], work)

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
    assert done == ["1", "long", "other", "2", "3"] and promises["3"].result == Plain()
    put("a", 5, "5")
    clock[0] += 1.01 * futures.GAP
    until(lambda: promises["5"].result is not None)  # and one that never comes is still missed
    said = promises["5"].result
    assert isinstance(said, Failed) and "request 4 of this model never arrived" in said.error
    lines.close()


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
    waiting.set(Plain())
    assert there() == ["d"]


def test_what_a_sample_weighs_is_what_it_holds() -> None:
    top = Top(torch.zeros(7, 50, dtype=torch.long), torch.zeros(7, 50), (True,) * 7)
    plain = Sequence((1, 2, 3), (0.0, 0.0, 0.0), "stop")
    small = futures.size(SampleOutput((plain,)))
    assert small == 6 * 32
    assert futures.size(SampleOutput((plain,), top_prompt=top)) == small + 7 * 50 * 12
    assert futures.size(SampleOutput((Sequence((1, 2, 3), (0.0,) * 3, "stop", top),))) == small + 7 * 50 * 12
    assert futures.size(SampleOutput((plain,), alternatives=(top.ids, top.logprobs))) == small + 7 * 50 * 12


def test_a_result_that_went_out_counts_as_fetched(served: Served) -> None:
    (later,) = [m for c in served.host.after_load if isinstance(m := getattr(c, "__self__", None), Later)]
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
