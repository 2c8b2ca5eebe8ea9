"""A chat endpoint over real HTTP whose answers a test writes; it records the requests and how many run at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


@dataclass
class Answer:
    """What goes over the wire: a message with its usage, or a status with a text; ``drop`` closes without a word."""

    content: str | None = None
    tool_calls: list[Any] | None = None
    finish: str = "stop"
    usage: dict[str, int] | None = field(default_factory=lambda: {"prompt_tokens": 10, "completion_tokens": 5})
    status: int = 200
    raw: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False


@dataclass
class Server:
    """``answer(body, how often this very body came before)`` decides."""

    answer: Callable[[Body, int], Answer]
    url: str = ""
    bodies: list[Body] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    now: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, body: Body, key: str | None) -> int:
        with self.lock:
            before = self.bodies.count(body)
            self.bodies.append(body)
            self.keys.append(key)
            self.now += 1
            self.most = max(self.most, self.now)
        return before

    def leave(self) -> None:
        with self.lock:
            self.now -= 1


@contextmanager
def serving(answer: Callable[[Body, int], Answer]) -> Iterator[Server]:
    server = Server(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            before = server.enter(body, self.headers.get("Authorization"))
            try:
                found = server.answer(body, before)
            finally:
                server.leave()
            if found.drop:
                self.close_connection = True
                self.connection.close()
                return
            message = {"role": "assistant", "content": found.content}
            if found.tool_calls is not None:
                message["tool_calls"] = found.tool_calls
            data = {"choices": [{"index": 0, "message": message, "finish_reason": found.finish}], "usage": found.usage}
            text = (found.raw if found.raw is not None else json.dumps(data)).encode()
            self.send_response(found.status if self.path == "/v1/chat/completions" else 404)
            for name, value in {**found.headers, "Content-Length": str(len(text))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

        def handle(self) -> None:
            with suppress(ConnectionError, ValueError):  # the test's own dropped connection
                super().handle()

    class Http(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass

    http = Http(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_port}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
