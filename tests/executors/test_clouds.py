"""Modal and Hugging Face Jobs through their installed SDKs, up to the call that needs a token, with exact arguments."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from earnest.diloco.executors import ExecutorError, Job, get_executor
from earnest.diloco.executors.hf_jobs import HFJobsExecutor
from earnest.diloco.executors.modal import ModalExecutor, work

SOURCE = "git+https://example.org/earnest@v1"
JOB = Job("s3://bucket/runs/night-1", 2, {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}, folder="/here")


@pytest.fixture(autouse=True)
def install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EARNEST_INSTALL", SOURCE)


@pytest.mark.parametrize("name", ["modal", "hf", "ray:10.0.0.1:6379", "monarch:tcp://10.0.0.1:26600"])
def test_machines_elsewhere_need_a_store_they_reach_and_choose_their_own_folder(name: str) -> None:
    executor = get_executor(name)
    with pytest.raises(ExecutorError, match=r"only this machine can reach; give a bucket with store=s3"):
        executor.dry_run(Job("file:///tmp/run", 2))
    shown = json.dumps(executor.dry_run(JOB))
    assert "/here" not in shown and "s3://bucket/runs/night-1" in shown and len(executor.dry_run(JOB)) == 2
    assert "--replica" in shown


# --- Hugging Face Jobs ------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A fake Hub over HTTP: it records what the real SDK sends."""
    state: dict[str, Any] = {"posts": [], "stage": "RUNNING", "cancelled": [], "keys": set(), "refuse": 0, "lost": 0}
    state |= {"asked": [], "uncancellable": 0}
    info = {"id": "job-1", "createdAt": "2026-11-16T00:00:00.000Z", "dockerImage": "x", "command": [], "arguments": []}
    info |= {
        "environment": {},
        "secrets": {},
        "flavor": "cpu-basic",
        "owner": {"id": "1", "name": "me", "type": "user"},
    }

    class Handler(BaseHTTPRequestHandler):
        def _send(self, data: Any, code: int = 200) -> None:
            state["keys"].add(self.headers.get("Authorization"))
            text = json.dumps(data).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self) -> None:
            state["asked"].append(self.path)
            if "/api/jobs/" in self.path and state["lost"]:
                state["lost"] -= 1
                self._send({"error": "bad gateway"}, 502)
            elif self.path.endswith("/whoami-v2"):
                self._send({"name": "me", "type": "user"})
            else:
                self._send(info | {"status": {"stage": state["stage"], "message": "said the hub"}})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path.endswith("/cancel") and state["uncancellable"]:
                state["uncancellable"] -= 1
                self._send({"error": "too many requests"}, 429)
            elif self.path.endswith("/cancel"):
                state["cancelled"].append(self.path)
                self._send({})
            elif state["refuse"]:
                self._send({"error": "no such right"}, state["refuse"])
            else:
                state["posts"].append((self.path, json.loads(body)))
                self._send(info | {"status": {"stage": "SCHEDULING", "message": None}})

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    import huggingface_hub
    from huggingface_hub import constants

    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield state
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_job_is_submitted_watched_and_cancelled_on_the_wire(
    hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = HFJobsExecutor("a10g-small")
    executor.every = 0.0
    executor.start(JOB, 1, 2)
    ((path, body),) = hub["posts"]
    assert path == "/api/jobs/me"
    assert body == {
        "command": [
            *("uvx", "--from", SOURCE),
            *("earnest", "worker", "s3://bucket/runs/night-1", "--replica", "1"),
        ],
        "arguments": [],
        "environment": {},
        "flavor": "a10g-small",
        "secrets": dict(JOB.env),
        "timeoutSeconds": 24 * 3600,
        "attempts": 1,
        "labels": {"earnest": "night-1", "replica": "1", "name": "earnest-night-1-replica-1-2"},
        "dockerImage": "ghcr.io/astral-sh/uv:python3.11-bookworm",
    }
    assert hub["keys"] == {"Bearer hf_test"}
    assert executor.poll() == []
    hub["lost"] = 3  # the network fails for a while; no job is given up
    assert [executor.poll() for _ in range(3)] == [[], [], []]
    hub["stage"] = "ERROR"
    (end,) = executor.poll()
    assert (end.replica, end.attempt, end.code, end.detail) == (1, 2, 1, "said the hub")
    executor.start(JOB, 0, 1)
    executor.stop()
    assert hub["cancelled"] == ["/api/jobs/me/job-1/cancel"]
    assert hub["asked"].count("/api/whoami-v2") == 1, "the Hub limits requests: the namespace is fetched once"
    monkeypatch.delenv("EARNEST_INSTALL")
    with pytest.raises(ExecutorError, match=r"set \$EARNEST_INSTALL to the sources of earnest"):
        executor.start(JOB, 0, 1)


def test_jobs_are_looked_at_rarely_and_cancelled_whatever_fails(hub: dict[str, Any]) -> None:
    """supervise() polls twice a second; the Hub's rate limit must not end the launcher and leave paid jobs running."""
    executor = HFJobsExecutor()
    for replica in (0, 1):
        executor.start(JOB, replica, 1)
    before = len(hub["asked"])
    for _ in range(50):
        assert executor.poll() == []
    assert len(hub["asked"]) - before == 2, "one look at each of two jobs"
    assert 10 <= executor.every <= 30
    hub["lost"], executor._next = 1, 0.0
    assert executor.poll() == [] and executor._next - time.monotonic() > 1.9 * executor.every, "later after a failure"
    executor.every = 0.0
    hub["uncancellable"] = 4  # the first job's three tries, and one of the second's
    with pytest.raises(ExecutorError, match=r"1 jobs could not be cancelled and may still run: job-1\. Cancel each"):
        executor.stop()
    assert len(hub["cancelled"]) == 1


@pytest.mark.parametrize("name", ["modal", "hf", "ray:10.0.0.1:6379", "monarch:tcp://10.0.0.1:26600"])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"env": {"AWS_ENDPOINT_URL": "http://127.0.0.1:9000"}}, r"\$AWS_ENDPOINT_URL=http://127.* this machine only"),
        ({"env": {"GOOGLE_APPLICATION_CREDENTIALS": __file__}}, r"\$GOOGLE_APPLICATION_CREDENTIALS is a path of this"),
        ({"files": {"data": "pairs.jsonl"}}, r"data=pairs\.jsonl is a file of this machine"),
    ],
)
def test_what_only_this_machine_has_is_refused_elsewhere(name: str, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ExecutorError, match=sentence):
        get_executor(name).dry_run(replace(JOB, **change))


def test_without_a_token_the_error_names_the_way_to_get_one(
    hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub["refuse"] = 403
    with pytest.raises(ExecutorError, match=r"(?s)replica 0 was not started: .*huggingface\.co/settings/tokens"):
        get_executor("hf").start(JOB, 0, 1)
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(
        ExecutorError, match=r"huggingface\.co/settings/tokens, then run `hf auth login`, or set HF_TOKEN"
    ):
        get_executor("hf").start(JOB, 0, 1)


def test_what_would_be_submitted_names_secrets_and_does_not_show_them() -> None:
    (first, second) = get_executor("hf").dry_run(JOB)
    assert first["secrets"] == ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"] and first["flavor"] == "cpu-basic"
    assert first["name"] == "earnest-night-1-replica-0-1" and second["labels"]["replica"] == "1"


# --- Modal ------------------------------------------------------------------------------------------------------------


def test_modals_function_has_exactly_these_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real SDK builds the app, the image and the function; its own methods are watched, not replaced."""
    import modal

    seen: dict[str, Any] = {}
    real_function, real_source = modal.App.function, modal.Image.add_local_python_source
    real_install, real_slim = modal.Image.uv_pip_install, modal.Image.debian_slim

    def function(self: Any, **arguments: Any) -> Any:
        seen["function"] = arguments
        return real_function(self, **arguments)

    def source(self: Any, *modules: str, **arguments: Any) -> Any:
        seen["source"] = (modules, arguments)
        return real_source(self, *modules, **arguments)

    def install(self: Any, *packages: str) -> Any:
        seen["packages"] = packages
        return real_install(self, *packages)

    def slim(**arguments: Any) -> Any:
        seen["python"] = arguments
        return real_slim(**arguments)

    monkeypatch.setattr(modal.App, "function", function)
    monkeypatch.setattr(modal.Image, "add_local_python_source", source)
    monkeypatch.setattr(modal.Image, "uv_pip_install", install)
    monkeypatch.setattr(modal.Image, "debian_slim", slim)
    executor = ModalExecutor("A10G")
    app, made = executor.build(JOB)
    arguments = dict(seen["function"])
    assert isinstance(arguments.pop("image"), modal.Image) and len(arguments.pop("secrets")) == 1
    assert arguments == {
        "name": "worker",
        "gpu": "A10G",
        "timeout": 86_400,
        "retries": 0,
        "serialized": True,
        "single_use_containers": True,
    }
    assert arguments == executor.dry_run(JOB)[0]["function"], "what is shown is what is submitted"
    modules, options = seen["source"]
    assert modules == ("earnest", "earnest_audit") and options["ignore"] == ["**/__pycache__/**", "**/*.pyc"]
    assert any(p.startswith("torch") for p in seen["packages"]) and any(
        p.startswith("obstore") for p in seen["packages"]
    )
    assert not any(p.startswith(("ray", "pytest")) for p in seen["packages"])
    import sys

    assert seen["python"] == {"python_version": f"{sys.version_info.major}.{sys.version_info.minor}"}
    assert app.name == "earnest" and isinstance(made, modal.Function)
    assert executor.dry_run(JOB)[1]["spawn"] == ["worker", "s3://bucket/runs/night-1", "--replica", "1"]
    assert ModalExecutor().settings()["gpu"] is None


def test_what_the_container_runs() -> None:
    code, words = work(["objectives", "nonsense"])
    assert code == 2 and "objective 'nonsense' is unknown" in words


def test_without_a_modal_token_the_error_names_the_way_to_get_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The SDK itself is asked to run the app; its refusal becomes the sentence."""
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "MODAL_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "none.toml"))
    executor = get_executor("modal")
    with pytest.raises(
        ExecutorError, match=r"account at modal\.com, then run `modal token new`, or set MODAL_TOKEN_ID"
    ):
        executor.start(JOB, 0, 1)
    executor.stop()
