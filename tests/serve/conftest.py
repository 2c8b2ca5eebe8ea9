"""A real server: uvicorn in a thread, nano, a fresh folder; clients use HTTP."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

# Before any thread: the server loads its model in one, and the tests' import hook parses source, which CPython 3.11 and
# 3.12 do not do safely in two threads at once (SystemError: AST constructor recursion depth mismatch).
import earnest.serve.decode
import earnest.serve.learner
import earnest.serve.tinker.service  # noqa: F401
from earnest.serve.app import create_app
from earnest.serve.connections import with_header_limit
from earnest.serve.settings import ServeSettings
from earnest.serve.state import State

LEARN = """
adapter: {kind: lora, rank: 4}
optimizer: {kind: adamw, lr: 3e-3}
updates: 2
gate:
  {prompts: ["Describe the sea.", "Hello!", "Give advice about the garden."], max_new_tokens: 8, self_similarity: 0.95}
"""


class Live:
    """A server that runs, and a client for it."""

    def __init__(self, state: State, url: str, server: uvicorn.Server, key: str | None = None) -> None:
        self.state, self.url, self.server = state, url, server
        self.seeds = itertools.count()
        self.http = httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {key}"} if key else {})

    def chat(self, model: str = "assistant", text: str = "Describe the fox.", **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        body = {"model": model, "messages": messages, "max_tokens": 12, "seed": next(self.seeds), **more}
        found = self.http.post("/v1/chat/completions", json=body)
        assert found.status_code == 200, found.text
        return found.json()

    def teach(self, completion: dict[str, Any], **said: Any) -> dict[str, Any]:
        found = self.http.post("/v1/feedback", json={"completion_id": completion["id"], **said})
        assert found.status_code == 202, found.text
        return found.json()

    def learned(self, feedback: dict[str, Any]) -> dict[str, Any]:
        """Wait until the feedback is no longer queued."""
        while (found := self.http.get(f"/v1/feedback/{feedback['id']}").json())["status"] == "queued":
            assert self.server.started and not self.server.should_exit, "the server ended"
            time.sleep(0.05)
        return found

    def get(self, path: str, **query: Any) -> Any:
        found = self.http.get(path, params=query)
        assert found.status_code == 200, found.text
        return found.json()

    def post(self, path: str, body: dict[str, Any] | None = None, status: int = 200) -> Any:
        found = self.http.post(path, json=body or {})
        assert found.status_code == status, found.text
        return found.json()


@contextmanager
def serving(folder: Path, key: str | None = None, **settings: Any) -> Iterator[Live]:
    (folder / "learn.yaml").write_text(LEARN)
    given = {"data": folder / "data", "learn": folder / "learn.yaml", "port": 0, **settings}
    app = create_app(ServeSettings(**given))
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        http=with_header_limit(app.state.earnest.settings.header_wait),
        log_config=None,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=300,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    live = Live(app.state.earnest, f"http://127.0.0.1:{listener.getsockname()[1]}", server, key)
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield live
    finally:
        live.http.close()
        app.state.earnest.bus.close()
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """One server for the tests that leave it as they found it, or use an adapter of their own."""
    with serving(tmp_path_factory.mktemp("serve")) as found:
        yield found


@pytest.fixture
def adapter(live: Live, request: pytest.FixtureRequest) -> Iterator[Callable[..., str]]:
    """Makes adapters that are gone after the test. What they learn from does not depend on the tests before."""
    made: list[str] = []
    live.seeds = itertools.count()

    def make(name: str, **learn: Any) -> str:
        live.post("/v1/adapters", {"name": name, "learn": learn}, 201)
        made.append(name)
        return name

    yield make
    for name in made:
        live.http.delete(f"/v1/adapters/{name}")
