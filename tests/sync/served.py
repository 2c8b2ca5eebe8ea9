"""An `earnest serve` in a process of its own, and an HTTP proxy in front of it that can inject faults."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a real server with nano."""
    command = [sys.executable, "-m", "earnest.cli", "serve", "--port", "0", "--data", str(folder), "--threads", "1"]
    log = (folder.parent / "serve.log").open("w")
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found, (folder.parent / "serve.log").read_text()
        yield found.group()
    finally:
        process.terminate()
        process.wait()
        log.close()


Answer = tuple[int, str, bytes]
Forward = Callable[[str, bytes], Answer]


class Proxy(ThreadingHTTPServer):
    """Hands requests on, after ``before`` (None: answer 200 and hand nothing on) and with ``after`` on the JSON.

    ``lose``: what was handed on is answered with a 502, or not at all; ``refuse``: one status for another.
    """

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.before: Callable[[str, bytes], tuple[str, bytes] | None] = lambda path, body: (path, body)
        self.after: Callable[[str, Any], Any] = lambda path, found: found
        self.lose: Callable[[str], Literal["502", "cut"] | None] = lambda path: None
        self.refuse: dict[int, int] = {}
        self.seen: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def forward(self, method: str, path: str, body: bytes) -> Answer:
        kind = "application/octet-stream" if path.startswith("/v1/upload") else "application/json"
        request = urllib.request.Request(self.upstream + path, body or None, {"Content-Type": kind}, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, answer.headers["Content-Type"], answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers["Content-Type"], error.read()


class _Handler(BaseHTTPRequestHandler):
    server: Proxy

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        passed = self.server.before(self.path, body)
        status, kind, raw = 200, "text/plain", b"Success."
        if passed is not None:
            status, kind, raw = self.server.forward(self.command, *passed)
        if status == 200 and kind.startswith("application/json"):
            raw = json.dumps(self.server.after(self.path, json.loads(raw))).encode()
        status = self.server.refuse.get(status, status)
        if (lost := self.server.lose(self.path)) == "502":
            status, kind, raw = 502, "text/html", b"<h1>Bad Gateway</h1>"
        elif lost == "cut":
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST = _serve

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def proxied(upstream: str) -> Iterator[Proxy]:
    with Proxy(upstream) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.shutdown()
            thread.join()


def swallow_pushes(proxy: Proxy, rename: bool) -> None:
    """Let the first push through and answer later ones with 200; ``rename``: ask for the first under every name."""
    first: list[str] = []

    def before(path: str, body: bytes) -> tuple[str, bytes] | None:
        if "load_lora_adapter" in path:  # loads, uploads and unloads
            if first:
                return None
            first.append(path.split("lora_name=")[1].split("&")[0])
        if path == "/v1/completions" and rename:
            body = json.dumps({**json.loads(body), "model": first[0]}).encode()
        return path, body

    proxy.before = before


def speak(proxy: Proxy, kind: str) -> list[dict[str, Any]]:
    """vLLM's or SGLang's words in front of our server: adapters by path, their sampling fields, SGLang's paths without
    /v1 and its models as base:adapter. Returns the bodies that it saw.
    """
    bodies: list[dict[str, Any]] = []
    prefix = "" if kind == "sglang" else "/v1"

    def before(path: str, body: bytes) -> tuple[str, bytes] | None:
        if path == f"{prefix}/unload_lora_adapter":
            return "/v1/unload_lora_adapter", body
        if path == f"{prefix}/load_lora_adapter":
            said = json.loads(body)
            bodies.append(said)
            content = io.BytesIO()
            with zipfile.ZipFile(content, "w") as archive:
                for file in Path(said["lora_path"]).iterdir():
                    archive.write(file, file.name)
            return f"/v1/upload_lora_adapter?lora_name={said['lora_name']}", content.getvalue()
        if path == "/v1/completions":
            said = json.loads(body)
            bodies.append(dict(said))
            for name in ("min_p", "repetition_penalty", "stop_token_ids"):
                said.pop(name, None)
            if kind == "sglang":
                base, said["model"] = said["model"].split(":")
                assert base == "base", base
            said["top_k"] = max(said.get("top_k", 0), 0)
            body = json.dumps(said).encode()
        return path, body

    def after(path: str, found: Any) -> Any:
        if path == "/v1/models":
            found["data"] = [{**m, "owned_by": kind} for m in found["data"]]
        return found

    proxy.before, proxy.after = before, after
    return bodies
