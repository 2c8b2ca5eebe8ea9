"""Nothing that a client sends can stop the server, or stop it again after each restart."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import earnest as en
from earnest.serve.attempts import Attempts
from tests.serve.conftest import Live
from tests.serve.processes import process
from tests.serve.test_learning import SMALL
from tests.serve.test_push import files, zipped

EVIL = "(.+)+!"
# The update of the adapter `deadly` ends the process at once, as a fault inside a kernel or a lack of memory does.
DEADLY = """
import os
from earnest.serve.learner import Learner
update = Learner._update
def _update(self, row, *more):
    if row.name == "deadly":
        os._exit(9)
    return update(self, row, *more)
Learner._update = _update
"""


@pytest.mark.parametrize("targets", [f"re:{EVIL}", ["q_proj", f"re:{EVIL}"]])
def test_an_expression_in_learn_is_refused(live: Live, targets: Any) -> None:
    body = {"name": "slow", "learn": {"adapter": {"kind": "lora", "targets": targets}}}
    refused = live.http.post("/v1/adapters", json=body)
    assert refused.status_code == 400 and "regular expression" in refused.json()["error"]["message"]
    assert live.http.get("/v1/adapters/slow").status_code == 404


def test_an_expression_that_is_stored_already_fails_its_feedback_only(live: Live, adapter) -> None:
    """A database of an earlier release may hold one."""
    name = adapter("stored")
    learn = json.dumps({"adapter": {"kind": "lora", "targets": f"re:{EVIL}"}})
    live.state.store.db.write(lambda c: c.execute("UPDATE adapters SET learn = ? WHERE name = ?", (learn, name)))
    given = live.learned(live.teach(live.chat(name), text="Too cold."))
    assert given["status"] == "failed" and "regular expression" in given["note"]


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules"])
def test_an_expression_in_an_upload_is_refused(live: Live, tmp_path: Path, key: str) -> None:
    live.state.host.wait()
    folder = en.attach(en.load("nano"), en.LoRA(rank=1), targets=["q_proj"]).save(tmp_path / "a", "nano")
    found = {n: c for n, c in files(folder).items() if not n.startswith("earnest_")}
    found["adapter_config.json"] = json.dumps(json.loads(found["adapter_config.json"]) | {key: EVIL}).encode()
    refused = live.http.post("/v1/upload_lora_adapter", params={"lora_name": "slow"}, content=zipped(found))
    assert refused.status_code == 400 and "regular expression" in refused.json()["error"]["message"]


def _teach(server, name: str) -> None:
    """Ask and give feedback; the server may die before it answers."""
    chat = server.chat(name).json()["id"]
    server.http.post("/v1/feedback", json={"completion_id": chat, "text": "Warmer please."})


def test_an_adapter_whose_update_ran_at_two_deaths_waits_and_stops_no_other(live: Live, adapter) -> None:
    """A new process makes an ``Attempts`` first; an update that is marked as running then was ended by a death."""
    deadly, fine = (adapter(name, updates=1, gate=SMALL) for name in ("deadly", "fine"))
    row = live.state.store.adapter(deadly)
    for _ in range(2):
        assert "set_aside" not in live.get("/health")
        live.state.attempts.begin(row.id)
        Attempts(live.state.store.db)
    assert live.get("/health")["set_aside"] == 1 and "died 2 times" in live.get(f"/v1/adapters/{deadly}")["set_aside"]
    given = live.teach(live.chat(deadly, max_tokens=4), text="Too cold.")
    assert live.learned(live.teach(live.chat(fine, max_tokens=4), text="Too cold."))["status"] != "queued"
    assert live.get(f"/v1/feedback/{given['id']}")["status"] == "queued"
    assert live.post(f"/v1/adapters/{deadly}/resume")["set_aside"] is None
    assert live.learned(given)["status"] != "queued"
    live.state.attempts.begin(row.id)
    live.state.attempts.end(row.id, done=False)  # by a shutdown
    Attempts(live.state.store.db)
    assert live.state.store.db.read("SELECT deaths FROM attempts WHERE adapter = ?", (row.id,))[0]["deaths"] == 0


@pytest.mark.slow
def test_an_update_that_kills_the_server_twice_is_set_aside(tmp_path: Path) -> None:
    with process(tmp_path, "--adapter", "deadly", "--adapter", "fine", before=DEADLY) as server:
        _teach(server, "deadly")
        assert server.process.wait() == 9
    with process(tmp_path, before=DEADLY) as server:
        assert server.process.wait() == 9  # the feedback is durable, so it is tried again
    with process(tmp_path, before=DEADLY) as server:
        _teach(server, "fine")
        while server.http.get("/v1/feedback", params={"adapter": "fine"}).json()["counts"]["applied"] == 0:
            assert server.process.poll() is None
            time.sleep(0.05)
        assert server.http.get("/health").json()["set_aside"] == 1
        shown = server.http.get("/v1/adapters/deadly").json()
        assert "died 2 times" in shown["set_aside"] and "/v1/adapters/deadly/resume" in shown["set_aside"]
        assert shown["feedback"]["queued"] == 1 and server.http.get("/v1/adapters/fine").json()["set_aside"] is None
        with server.http.stream("GET", "/v1/events", headers={"Last-Event-ID": "0"}) as stream:
            line = next(x for x in stream.iter_lines() if x.startswith("data:") and "set aside" in x)
        assert json.loads(line[5:])["adapter"] == "deadly"
    with process(tmp_path) as server:  # whatever killed it is gone: somebody resumes, and nothing was lost
        assert server.http.get("/health").json()["set_aside"] == 1
        assert server.http.post("/v1/adapters/deadly/resume").json()["set_aside"] is None
        while server.http.get("/v1/feedback", params={"adapter": "deadly"}).json()["counts"]["applied"] == 0:
            time.sleep(0.05)
        assert "set_aside" not in server.http.get("/health").json()


@pytest.mark.slow
def test_a_shutdown_does_not_count_as_a_death(tmp_path: Path) -> None:
    """An update that a shutdown ends is tried again, however often."""
    for _ in range(2):
        with process(tmp_path) as server:
            if not server.http.get("/v1/adapters/assistant").json()["feedback"]["queued"]:
                _teach(server, "assistant")
            while server.http.get("/health").json().get("learning") is None:
                if server.http.get("/v1/adapters/assistant").json()["feedback"]["queued"] == 0:
                    _teach(server, "assistant")
                time.sleep(0.01)
    with sqlite3.connect(tmp_path / "data" / "earnest.sqlite3") as db:
        assert db.execute("SELECT COUNT(*) FROM attempts WHERE deaths > 0 OR running").fetchone()[0] == 0


def _lora(folder: Path, **config: Any) -> dict[str, bytes]:
    """The PEFT files of a LoRA with a B that is not zero, its config changed."""
    made = en.attach(en.load("nano"), en.LoRA(rank=2), targets=["q_proj", "down_proj"])
    for name, tensor in made.named_tensors().items():
        if name.endswith("B"):
            torch.nn.init.normal_(tensor, std=0.02, generator=torch.Generator().manual_seed(0))
    found = {n: c for n, c in files(made.save(folder, "nano")).items() if not n.startswith("earnest_")}
    found["adapter_config.json"] = json.dumps(json.loads(found["adapter_config.json"]) | config).encode()
    return found


@pytest.mark.parametrize("alpha", [1e308, 1e30, 1e10, float("inf"), float("nan"), -1e30])
def test_an_upload_whose_numbers_cannot_be_used_is_refused(live: Live, tmp_path: Path, alpha: float) -> None:
    """At 1e308 every chat in its batch failed; at 1e30 the answers came from a uniform distribution."""
    live.state.host.wait()
    content = zipped(_lora(tmp_path / "a", lora_alpha=alpha))
    refused = live.http.post("/v1/upload_lora_adapter", params={"lora_name": "bad"}, content=content)
    assert refused.status_code == 400 and "cannot be used with nano" in refused.json()["error"]["message"], refused.text
    assert live.http.get("/v1/models/bad").status_code == 404


def test_a_request_that_fails_fails_alone(live: Live, tmp_path: Path, monkeypatch) -> None:
    """Everybody else in the batch gets the tokens of an answer without company, each streamed once."""
    live.state.host.wait()
    content = zipped(_lora(tmp_path / "a", lora_alpha=2))
    named = {"lora_name": "broken"}
    assert live.http.post("/v1/upload_lora_adapter", params=named, content=content).status_code == 200
    with live.state.leases.lease("broken") as lease:
        assert lease.adapter is not None
        slot = next(iter(lease.adapter.slots.values()))

        def fails(*_: Any) -> None:
            raise RuntimeError("value cannot be converted to type float without overflow")

        ask = {"max_tokens": 12, "temperature": 1, "logprobs": True}
        want = [live.chat("base", seed=i, **ask)["choices"][0]["logprobs"]["content"] for i in range(6)]
        monkeypatch.setattr(type(slot.variant), "delta", fails, raising=False)
        monkeypatch.setattr(type(slot.variant), "factors", fails)
        answers: dict[int, Any] = {}

        def one(i: int) -> None:
            body = {
                "model": "base" if i < 6 else "broken",
                "messages": [{"role": "user", "content": "Describe the fox."}],
            }
            with httpx.Client(base_url=live.url, timeout=60) as client:
                answers[i] = client.post("/v1/chat/completions", json=body | ask | {"seed": i, "stream": True}).text

        with live.state.host.turn("load"):  # so that they are decoded together
            threads = [threading.Thread(target=one, args=(i,)) for i in range(7)]
            for thread in threads:
                thread.start()
            while live.state.host.decoder.load()["waiting"] < 7:
                time.sleep(0.01)
        for thread in threads:
            thread.join()
    assert '"error"' in answers[6]
    for i in range(6):
        lines = [json.loads(x[6:]) for x in answers[i].splitlines() if x.startswith("data: {")]
        found = [t for c in lines for t in ((c["choices"][0]["logprobs"] or {}).get("content") or [])]
        assert [t["token"] for t in found] == [t["token"] for t in want[i]]
    assert live.http.post("/v1/unload_lora_adapter", json=named).status_code == 200
