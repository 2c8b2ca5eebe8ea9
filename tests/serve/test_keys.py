"""Who may do what; what is refused before it is read, or because too much waits already."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import yaml

import earnest as en
from earnest.errors import ConfigError
from earnest.serve.keys import Caller, Keys, new_key
from earnest.serve.settings import ServeSettings
from earnest.serve.state import State
from tests.serve.conftest import Live, serving
from tests.serve.test_push import files, zipped

OWNER, READER, OTHER, TEACHER = "tml-owner-secret", "tml-reader-secret", "tml-other-secret", "tml-teacher-secret"
EVERYTHING = ["read", "teach", "delete"]


def _file(folder: Path) -> Path:
    def entry(name: str, key: str, allow: dict[str, list[str]]) -> dict[str, object]:
        return {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "allow": allow}

    path = folder / "keys.yaml"
    keys = [
        entry("owner", OWNER, {"team/*": EVERYTHING, "tinker": EVERYTHING, "base": ["read"]}),
        entry("teacher", TEACHER, {"team/*": EVERYTHING[:2], "tinker": EVERYTHING[:2]}),
        entry("reader", READER, {"team/*": ["read"]}),
        entry("other", OTHER, {"other": ["read", "teach"]}),
    ]
    path.write_text(yaml.safe_dump({"keys": keys}))
    return path


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("keys")
    with serving(folder, OWNER, keys=_file(folder), adapters=("team/a", "other"), max_body=4096) as found:
        yield found


def _as(live: Live, key: str | None) -> httpx.Client:
    return httpx.Client(base_url=live.url, timeout=60, headers={"X-API-Key": key} if key else {})


def test_rights(locked: Live) -> None:
    chat = locked.chat("team/a", max_tokens=4)
    body = {"completion_id": chat["id"], "text": "Warmer please."}
    with _as(locked, READER) as reader, _as(locked, OTHER) as other:
        ask = {"model": "team/a", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        assert reader.post("/v1/chat/completions", json=ask).status_code == 200
        assert [m["id"] for m in reader.get("/v1/models").json()["data"]] == ["team/a"]
        refused = reader.post("/v1/feedback", json=body)
        assert refused.status_code == 403 and "'reader' may not teach 'team/a'" in refused.json()["error"]["message"]
        for method, path in (("DELETE", ""), ("POST", "/rollback"), ("POST", "/pin"), ("POST", "/promote")):
            assert reader.request(method, f"/v1/adapters/team/a{path}", json={"version": 0}).status_code == 403
        assert reader.post("/v1/adapters/team/a/fork", json={"name": "team/b"}).status_code == 403
        # To somebody who may not read it, it does not exist; nor do its completions, feedback and events.
        nothing = other.post("/v1/chat/completions", json=ask)
        unknown = other.post("/v1/chat/completions", json={**ask, "model": "team/zzz"})
        assert nothing.status_code == unknown.status_code == 404
        assert nothing.json()["error"]["message"].replace("team/a", "X") == unknown.json()["error"]["message"].replace(
            "team/zzz", "X"
        )
        # A misspelled name gets the nearest one that the caller may read, and no other.
        for caller, wrong, meant in ((other, "othr", "'other'"), (reader, "team/b", "'team/a'"), (reader, "othr", "")):
            sentence = caller.post("/v1/chat/completions", json={**ask, "model": wrong}).json()["error"]["message"]
            assert (f"did you mean {meant}?" in sentence) if meant else ("other" not in sentence), sentence
        assert other.get(f"/v1/chat/completions/{chat['id']}").status_code == 404
        assert other.post("/v1/feedback", json={**body, "adapter": "other"}).status_code == 404
        given = locked.teach(chat, text="Warmer please.")
        assert other.get(f"/v1/feedback/{given['id']}").status_code == 404
        assert reader.get(f"/v1/feedback/{given['id']}").status_code == 200
        assert [a["name"] for a in other.get("/v1/adapters").json()["data"]] == ["other"]
        refused = other.post("/v1/adapters", json={"name": "mine"})
        assert refused.status_code == 403 and "'other' may not teach 'mine'" in refused.json()["error"]["message"]
        locked.learned(given)
        assert locked.state.store.feedback(given["id"]).key == "owner"


def test_the_right_to_teach_does_not_allow_deleting(locked: Live, tmp_path: Path) -> None:
    """Whoever may only teach pushes a new adapter, but takes none away: not in place, not by unloading; nor a
    checkpoint of the Tinker wire, at once or by letting it expire."""
    locked.state.host.wait()
    content = zipped(
        files(en.attach(en.load("nano"), en.LoRA(rank=1), targets=["q_proj"]).save(tmp_path / "a", "nano"))
    )
    named = {"lora_name": "team/pushed"}

    def push(client: httpx.Client, **more: bool) -> int:
        return client.post("/v1/upload_lora_adapter", params=named | more, content=content).status_code

    with _as(locked, TEACHER) as teacher, _as(locked, OWNER) as owner:
        assert push(teacher, load_inplace=True) == 200  # there is nothing yet that it would replace
        first = locked.state.store.adapter("team/pushed")
        assert push(teacher) == 409 and push(teacher, load_inplace=True) == 403
        body = named | {"lora_path": "none", "load_inplace": True}
        assert teacher.post("/v1/load_lora_adapter", json=body).status_code == 403
        refused = teacher.post("/v1/unload_lora_adapter", json=named)
        assert refused.status_code == 403 and "may not delete 'team/pushed'" in refused.json()["error"]["message"]
        assert teacher.post("/v1/abort_lora_adapter", json=named).status_code == 403
        assert teacher.post("/v1/adapters/team/pushed/rollback", json={"version": 0}).status_code == 200
        assert push(teacher) == 409 and locked.state.store.adapter("team/pushed").id == first.id
        assert push(owner, load_inplace=True) == 200 and locked.state.store.adapter("team/pushed").id != first.id
        assert owner.post("/v1/unload_lora_adapter", json=named).status_code == 200
        checkpoint = "/api/v1/training_runs/none/checkpoints/weights/1"
        for client, status in ((teacher, 403), (owner, 404)):
            assert client.get("/api/v1/training_runs").status_code == 200
            assert client.delete(checkpoint).status_code == status
            assert client.put(f"{checkpoint}/ttl", json={"ttl_seconds": 1}).status_code == status


def test_a_request_without_a_key_is_refused(locked: Live) -> None:
    with _as(locked, None) as nobody, _as(locked, "tml-guess") as guess:
        for path in ("/v1/models", "/v1/adapters", "/v1/events", "/v1/feedback?adapter=other"):
            assert nobody.get(path).status_code == 401, path
            refused = guess.get(path)
            assert refused.status_code == 401, path
            assert refused.headers["WWW-Authenticate"].startswith("Bearer "), path
        assert nobody.post("/api/v1/create_session", json={}).status_code == 401
        assert guess.post("/api/v1/create_session", json={}).status_code == 401
        assert set(nobody.get("/health").json()) == {"status", "version", "accepts_feedback"}


def test_bodies_have_a_limit(locked: Live) -> None:
    ask = {"model": "team/a", "messages": [{"role": "user", "content": "x" * 5000}]}
    found = locked.http.post("/v1/chat/completions", json=ask)
    assert found.status_code == 413 and found.json()["error"]["code"] == "request_too_large"

    def endless():
        for _ in range(100):
            yield b" " * 1000

    assert locked.http.post("/v1/feedback", content=endless()).status_code == 413  # no Content-Length to believe
    assert locked.http.get("/v1/models").status_code == 200


def test_a_key_is_not_shown(locked: Live) -> None:
    """What the server prints and keeps is in test_secrets.py; here, what a traceback or a debugger could show."""
    keys = Keys(locked.state.settings.keys)
    shown = repr(keys) + repr(vars(keys)) + repr(Caller("x", {"a": frozenset({"read"})}))
    assert not any(key in shown for key in (OWNER, READER, OTHER)) and "read" not in repr(
        Caller("x", {"a": frozenset({"read"})})
    )


def test_without_keys_only_loopback_requests_are_answered(live: Live) -> None:
    """A page of another origin, or a name that was rebound to 127.0.0.1, gets nothing."""
    assert live.http.get("/v1/models").status_code == 200
    assert live.http.get("/v1/models", headers={"Host": "evil.example"}).status_code == 403
    assert live.http.get("/v1/models", headers={"Origin": "http://evil.example"}).status_code == 403
    port = live.url.rsplit(":", 1)[1]
    for name in ("localhost", "127.0.0.1"):
        headers = {"Host": f"{name}:{port}", "Origin": f"http://{name}:{port}"}
        assert live.http.get("/v1/models", headers=headers).status_code == 200


def test_beyond_loopback_needs_keys(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "192.168.1.2", "::", "example.org"):
        with pytest.raises(ConfigError, match="needs --keys"):
            State(ServeSettings(host=host, data=tmp_path))
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        assert ServeSettings(host=host).loopback


def test_a_new_key_works(tmp_path: Path) -> None:
    key, entry = new_key("alice", "team/*")
    assert key not in entry and key.startswith("tml-") and len(key) > 40
    path = tmp_path / "keys.yaml"
    path.write_text(f"keys:\n{entry}\n")

    class Asked:
        headers = httpx.Headers({"Authorization": f"Bearer {key}"})

    caller = Keys(path).caller(Asked())  # type: ignore[arg-type]
    assert caller.name == "alice" and caller.may("team/a", "teach") and not caller.may("other", "read")
    printed = subprocess.run(
        [sys.executable, "-m", "earnest.cli", "serve", "--new-key", "bob"], capture_output=True, text=True, check=True
    ).stdout
    (tmp_path / "two.yaml").write_text(printed[printed.index("\nkeys:") :])
    assert Keys(tmp_path / "two.yaml").on


def test_mistakes_in_the_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    for text, words in (
        ("keys: []", "keys"),
        ("keys: [{name: a, sha256: xyz, allow: {}}]", "sha256"),
        (f"keys: [{{name: a, sha256: {'a' * 64}, allow: {{a: [write]}}}}]", "read"),
        (f"keys: [{{name: a, sha256: {'a' * 64}, allow: {{}}, alow: 1}}]", "alow"),
        (
            f"keys: [{{name: a, sha256: {'a' * 64}, allow: {{}}}}, {{name: b, sha256: {'a' * 64}, allow: {{}}}}]",
            "same sha256",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            Keys(path)


def test_a_full_queue_answers_429(tmp_path: Path) -> None:
    with serving(tmp_path, max_queued=2, max_waiting=2, max_rows=2) as live:
        live.state.wait()
        chat = live.chat(max_tokens=2)
        with live.state.host.turn("learn"):  # nobody learns, and nobody is answered, meanwhile
            said = {"completion_id": chat["id"], "text": "Warmer please."}
            codes = [live.http.post("/v1/feedback", json=said).status_code for _ in range(3)]
            assert codes == [202, 202, 429]
            full = live.http.post("/v1/feedback", json=said)
            assert full.headers["retry-after"] == "1" and full.json()["error"]["type"] == "rate_limit_error"
            assert len(live.state.store.queued(1, 10)) == 2
            thread, answers = _fill_the_chat_queue(live)
        thread.join()  # those that waited are answered
        assert [a.status_code for a in answers] == [200] and len(answers[0].json()["choices"]) == 2
        ask = {"model": "base", "messages": [{"role": "user", "content": "Hi"}], "n": 3, "max_tokens": 2}
        never = live.http.post("/v1/chat/completions", json=ask)  # no waiting would help, so it is no 429
        assert never.status_code == 400 and "at most 2 sequences" in never.json()["error"]["message"]


def _fill_the_chat_queue(live: Live) -> tuple[threading.Thread, list[httpx.Response]]:
    """While no request can be answered two sequences wait; another one is refused at once."""
    ask = {"model": "base", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    answers: list[httpx.Response] = []

    def wait() -> None:
        with httpx.Client(base_url=live.url, timeout=60) as client:
            answers.append(client.post("/v1/chat/completions", json={**ask, "n": 2}))

    thread = threading.Thread(target=wait)
    thread.start()
    while live.state.host.decoder.load()["waiting"] < 2:
        assert thread.is_alive(), answers
        time.sleep(0.01)
    for path, body in (("chat/completions", ask), ("completions", {"model": "base", "prompt": "Hi", "max_tokens": 2})):
        full = live.http.post(f"/v1/{path}", json=body)
        assert full.status_code == 429 and full.headers["retry-after"] == "1", full.text
        assert full.json()["error"]["type"] == "rate_limit_error"
        assert "2 sequences wait already, at most 2 may" in full.json()["error"]["message"]
    assert not answers
    return thread, answers
