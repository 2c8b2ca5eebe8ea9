"""`earnest serve`: one process, one port."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

from earnest.errors import ConfigError, EarnestError, MissingExtra
from earnest.serve.settings import ServeSettings


def run(settings: ServeSettings) -> None:
    """Serve until a signal; answers under way are finished first. A mistake in the settings is an error before anything
    is made or printed."""
    from earnest.models import hub
    from earnest.serve import learning

    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ImportError:
        raise MissingExtra("fastapi and uvicorn", "serve", "earnest serve") from None
    hub.require_model(settings.model)
    if settings.learn is not None:
        learning.read(settings.learn)
    from earnest.serve.app import create_app
    from earnest.serve.connections import with_header_limit

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for name in ("httpx", "httpcore", "huggingface_hub", "filelock", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)
    listener = _listener(settings)
    try:
        app = create_app(settings)
    except BaseException:
        listener.close()
        raise
    state = app.state.earnest

    class Server(uvicorn.Server):
        """Ends waiting parts at a shutdown, and prints the address once the server answers there."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            state.host.stopping = True  # an update under way is abandoned; its feedback stays queued
            state.bus.close()
            super().handle_exit(sig, frame)

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                port = self.servers[0].sockets[0].getsockname()[1]
                shown = f"[{settings.host}]" if ":" in settings.host else settings.host
                print(
                    f"earnest serve: http://{shown}:{port}  (model {settings.model}, data {settings.data})", flush=True
                )

    server = Server(
        uvicorn.Config(
            app,
            http=with_header_limit(settings.header_wait),
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,  # a client that reuses a connection just as it is closed would get an error
            timeout_graceful_shutdown=settings.shutdown_wait,
        )
    )
    threading.Thread(target=_watch, args=(state, server), name="earnest-watch", daemon=True).start()
    server.run(sockets=[listener])
    if state.host.failure is not None:
        raise ConfigError(state.host.failure)


def _listener(settings: ServeSettings) -> socket.socket:
    """The socket to listen on, before anything is loaded."""
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(2048)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"--host {settings.host} --port {settings.port}: cannot listen there ({error.strerror}); choose another "
            "port, or 0 for any free one."
        ) from None
    return found


def _watch(state: Any, server: Any) -> None:
    """A model that cannot be loaded ends the server: it would accept feedback that nothing ever learns from."""
    state.host._ready.wait()
    if state.host.failure is not None:
        state.host.stopping = True
        state.bus.close()
        server.should_exit = True


def main(settings: str) -> int:
    """Serve with these settings (JSON) as the child of a run (``sync.own_server``): it ends when its standard input is
    closed."""

    def wait() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="earnest-parent", daemon=True).start()
    try:
        run(ServeSettings.model_validate_json(settings))
    except EarnestError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
