"""A real server in a thread of this process (uvicorn on a free port), for the unmodified SDK."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

import earnest.serve.learner
import earnest.serve.tinker.service  # noqa: F401 (before any thread: see tests/serve/conftest.py)
from earnest.serve.app import create_app
from earnest.serve.host import Host
from earnest.serve.settings import ServeSettings


@contextmanager
def serving(data: Path) -> Iterator[tuple[str, Host]]:
    """The address and the host of ``earnest serve`` on nano, with its data in a folder."""
    app = create_app(ServeSettings(data=data, threads=1, adapters=()))
    host = app.state.earnest.host
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        host.wait()
        yield f"http://127.0.0.1:{port}", host
    finally:
        server.should_exit = True
        thread.join()
