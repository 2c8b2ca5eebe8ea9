"""A real server in a thread of this process (uvicorn on a free port), for the unmodified SDK."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from earnest.serve.host import Host
from earnest.serve.settings import ServeSettings


def app_of(data: Path) -> tuple[FastAPI, Host]:
    from earnest.serve.tinker import router

    settings = ServeSettings(data=data, threads=1)
    host = Host(settings)
    app = FastAPI()
    app.include_router(router(host, settings))
    host.start()
    return app, host


@contextmanager
def serving(data: Path) -> Iterator[tuple[str, Host]]:
    app, host = app_of(data)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        host.wait(60)
        yield f"http://127.0.0.1:{port}", host
    finally:
        server.should_exit = True
        thread.join()
        host.close()
