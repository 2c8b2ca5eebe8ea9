"""What a request meets before and beside its route: time limits, errors in plain words, a full disk, a bad start."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import stat
import time
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest

from earnest import cli
from earnest.errors import EarnestError
from earnest.serve import ServeSettings, server
from tests.models.test_loading import Hub, response
from tests.serve.conftest import Live, serving
from tests.serve.test_keys import OWNER, READER, _as, _file
from tests.serve.test_learning import SMALL

ASK = {"model": "base", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        (
            "/v1/feedback",
            {"completion_id": "x", "thumbs": "sideways"},
            "thumbs: Input should be 'up' or 'down'",
            "thumbs",
        ),
        ("/v1/feedback", {"completion_id": "x"}, "the body: is empty; give text", None),
        ("/v1/completions", {"model": "base", "prompt": {}}, "prompt: ", "prompt"),
        (
            "/v1/chat/completions",
            ASK | {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "content",
            None,
        ),
        ("/v1/chat/completions", ASK | {"stop": [""]}, "stop", None),
    ],
)
def test_a_mistake_is_named_without_internal_names(
    live: Live, path: str, body: dict[str, Any], message: str, param: str | None
) -> None:
    found = live.http.post(path, json=body)
    error = found.json()["error"]
    assert found.status_code == 400 and message in error["message"], error
    text = error["message"] + str(error["param"])
    assert not any(
        word in text for word in ("Item", "Batch", "TextPart", "function-", "[str]", "constrained", "Value error")
    )
    assert param is None or error["param"] == param


def test_bodies_that_are_not_json_are_refused(live: Live) -> None:
    broken = live.http.post(
        "/v1/feedback", content=b'{"completion_id": "x",', headers={"Content-Type": "application/json"}
    )
    error = broken.json()["error"]
    assert broken.status_code == 400 and error["message"].startswith("the body is not JSON, from character")
    assert error["param"] is None
    bare = live.http.post("/v1/chat/completions", content=json.dumps(ASK), headers={"Content-Type": "text/plain"})
    assert bare.status_code == 400 and "Content-Type: application/json" in bare.json()["error"]["message"]
    for method, path in (("GET", "/v1/nothing"), ("PUT", "/v1/models")):
        unknown = live.http.request(method, path)
        assert unknown.status_code in (404, 405)
        assert f"there is no route {method} {path}; GET /openapi.json" in unknown.json()["error"]["message"]


def test_a_500_leaves_the_connection_open(live: Live, monkeypatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    live.state.wait()
    with httpx.Client(base_url=live.url, timeout=60, limits=httpx.Limits(max_connections=1)) as client:
        client.get("/v1/models")
        monkeypatch.setattr(live.state.store, "adapters", broken)
        found = client.get("/v1/models")
        stream = found.extensions["network_stream"]
        assert found.status_code == 500 and "its log has the details" in found.json()["error"]["message"]
        monkeypatch.undo()
        time.sleep(0.1)
        again = client.get("/v1/models")
        assert again.status_code == 200 and again.extensions["network_stream"] is stream


def test_the_context_is_what_the_model_has(live: Live) -> None:
    live.state.wait()
    for length, status in ((512, 200), (513, 400)):
        body = {"model": "base", "prompt": [5] * 500, "max_tokens": length - 500, "seed": 0}
        assert live.http.post("/v1/completions", json=body).status_code == status
    answer = live.http.post("/v1/completions", json={"model": "base", "prompt": [5] * 511, "max_tokens": None})
    assert answer.json()["usage"]["total_tokens"] == 512


def test_slow_headers_and_slow_bodies_are_ended(tmp_path: Path) -> None:
    with serving(tmp_path, header_wait=0.3, body_wait=0.3) as live:
        host, port = live.url.removeprefix("http://").split(":")
        for start, ends in (
            (b"", b""),
            (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", b""),
            (b"POST /v1/feedback HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{", b"HTTP/1.1 408 "),
        ):
            with socket.create_connection((host, int(port)), timeout=5) as slow:
                slow.sendall(start)
                received = b""
                while part := slow.recv(65536):  # until the server closes it
                    received += part
            assert ends in received, received
        assert live.http.get("/health").status_code == 200
        # An answer that takes longer than both is not cut off.
        assert live.chat("base", max_tokens=200, n=8)["choices"]


def test_streams_of_events_have_a_bound(tmp_path: Path) -> None:
    with serving(tmp_path, OWNER, keys=_file(tmp_path), max_streams=2) as live, _as(live, READER) as reader:
        with live.http.stream("GET", "/v1/events") as first, live.http.stream("GET", "/v1/events") as second:
            lines = [stream.iter_lines() for stream in (first, second)]
            assert all(next(found) for found in lines)
            with live.http.stream("GET", "/v1/events") as beyond:
                assert beyond.status_code == 429
            with reader.stream("GET", "/v1/events") as other:
                assert other.status_code == 200, "each key has its own bound"
        limit = time.monotonic() + 30
        while live.state.streams.total():
            assert time.monotonic() < limit, "streams that ended still count"
            time.sleep(0.01)
        with live.http.stream("GET", "/v1/events") as third:
            assert third.status_code == 200


def test_other_users_of_the_machine_cannot_read_the_data(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        with serving(tmp_path) as live:
            live.chat("base")
            for path in (tmp_path / "data", tmp_path / "data" / "adapters"):
                assert stat.S_IMODE(path.stat().st_mode) == 0o700
            files = list((tmp_path / "data").glob("earnest.sqlite3*"))
            assert len(files) >= 2 and all(stat.S_IMODE(f.stat().st_mode) == 0o600 for f in files)
    finally:
        os.umask(old)


def test_the_schema_names_its_keys(live: Live) -> None:
    schema = live.get("/openapi.json")
    assert {s["type"] for s in schema["components"]["securitySchemes"].values()} == {"http", "apiKey"}
    assert (
        schema["paths"]["/v1/chat/completions"]["post"]["security"]
        and "security" not in schema["paths"]["/health"]["get"]
    )


def _pages(live: Live, most: int) -> None:
    """Let the database have at most this many pages: SQLite then reports a full disk."""
    live.state.store.db.submit(lambda c: c.execute(f"PRAGMA max_page_count = {most}").fetchone()).result()


def _full(*_: Any) -> None:
    raise sqlite3.OperationalError("database or disk is full")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as live:
        live.state.wait()
        chat = live.chat()
        _pages(live, 1)
        ask = ASK | {"messages": [{"role": "user", "content": "Describe the fox. " * 20}], "max_tokens": 8}
        codes = [live.http.post("/v1/chat/completions", json=ask).status_code for _ in range(30)]
        assert codes[-1] == 507, codes
        full = live.http.post("/v1/chat/completions", json=ask)
        assert (
            full.json()["error"]["code"] == "insufficient_storage" and "store: false" in full.json()["error"]["message"]
        )
        assert live.http.post("/v1/chat/completions", json=ask | {"store": False}).status_code == 200
        said = live.http.post("/v1/feedback", json={"completion_id": chat["id"], "text": "Warmer. " * 1000})
        assert said.status_code == 507
        with monkeypatch.context() as patch:  # not even the small row fits by which the server tests the disk
            patch.setattr(live.state.store.db, "write", _full)
            health = live.get("/health")
        assert health["accepts_feedback"] is False and "nothing can be stored: " in health["storage"]
        assert live.get("/v1/models")["data"]
        streamed = live.http.post("/v1/chat/completions", json=ask | {"stream": True}).text
        assert "insufficient_storage" in streamed and "[DONE]" not in streamed
        _pages(live, 1 << 30)
        assert live.http.post("/v1/chat/completions", json=ask).status_code == 200
        assert live.get("/health")["accepts_feedback"] is True


def test_an_answer_that_is_not_stored(live: Live) -> None:
    answer = live.chat("assistant", store=False)
    assert live.http.get(f"/v1/chat/completions/{answer['id']}").status_code == 404


@pytest.mark.parametrize("harm", ["cut", "missing"])
def test_damaged_files_of_a_version(live: Live, adapter, harm: str, caplog) -> None:
    name = adapter(f"harmed-{harm}", updates=1, gate=SMALL)
    live.learned(live.teach(live.chat(name), text="Too cold."))
    row = live.state.store.adapter(name)
    folder = live.state.store.version_folder(row.id, 1)
    live.state.leases.forget(row.id)
    for path in (folder / "adapter").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1]) if harm == "cut" else path.unlink()
    for found in (
        live.http.post("/v1/chat/completions", json=ASK | {"model": name}),
        live.http.get(f"/v1/adapters/{name}/versions/1/export"),
        live.http.post(f"/v1/adapters/{name}/fork", json={"name": "copy-of-harmed"}),
    ):
        assert found.status_code == 500 and found.json()["error"]["code"] == "damaged_version", found.text
        assert str(folder) not in found.text and "safetensors" not in found.text
    assert live.post(f"/v1/adapters/{name}/rollback", {"version": 0})["live"] == 0
    assert live.chat(name)["choices"]


def test_a_server_that_cannot_start_ends_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(port: int, data: object) -> str:
        with pytest.raises(SystemExit) as end:
            cli.main(["serve", "--port", str(port), "--data", str(data)])
        out, said = capsys.readouterr()
        assert end.value.code == 2 and "Traceback" not in said and "http://" not in out, said
        assert "loaded" not in said
        return said

    (tmp_path / "file").write_text("")
    assert "cannot write there" in refused(0, tmp_path / "file")
    assert "cannot write there" in refused(0, "/proc/earnest")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "earnest.sqlite3").write_bytes(b"no database " * 100)
    assert "its database cannot be opened" in refused(0, tmp_path / "broken")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen there" in refused(taken.getsockname()[1], tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_an_unknown_model_is_refused_before_the_address_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = huggingface_hub.errors.RepositoryNotFoundError("404", response=response(404))
    Hub(monkeypatch, missing, None)
    (tmp_path / "empty").mkdir()
    for model, words in (("org/none", "Hugging Face has no model 'org/none'"), (tmp_path / "empty", "no config.json")):
        with pytest.raises(EarnestError, match=words):
            server.run(ServeSettings(model=str(model), data=tmp_path / "data", port=0))
    assert capsys.readouterr().out == "" and not (tmp_path / "data").exists()
