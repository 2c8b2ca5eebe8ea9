"""The process that calls tools: it forks a child for every call, so that no call sees what another one left behind.

Started by ``sandbox.py`` as ``python -I sandbox_worker.py``; it uses the standard library only. Requests and replies
are JSON with a length in front, on its standard input and output. It ends when its input is closed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, Any

_RUN_OUT = 97
"""Exit code of a child that has no memory left to report its error with."""
_CHUNK = 1 << 16


def read(stream: IO[bytes]) -> Any:
    """The next message, or None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    return json.loads(stream.read(struct.unpack("I", head)[0]))


def write(stream: IO[bytes], message: Any) -> None:
    body = json.dumps(message).encode()
    stream.write(struct.pack("I", len(body)) + body)
    stream.flush()


def run_code(code: str) -> None:
    """Run Python code as a script; what it prints is the result."""
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


def find(entry: str) -> Any:
    """The function ``module:name`` or ``file.py:name``."""
    place, _, name = entry.rpartition(":")
    if not place:
        return globals()[name]
    if place.endswith(".py"):
        if place not in sys.modules:
            spec = importlib.util.spec_from_file_location(f"tool_{Path(place).stem}", place)
            assert spec is not None and spec.loader is not None, "a .py file always has a loader"
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            sys.modules[place] = module
        found: Any = sys.modules[place]
    else:
        found = importlib.import_module(place)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def describe(error: BaseException) -> str:
    """An exception as one line: its kind, its text, and the line of the code that raised it."""
    if isinstance(error, MemoryError):
        return "MemoryError: it needs more memory than it may have"
    if isinstance(error, SystemExit):
        return f"it called exit({error.code!r})"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<code>"]
    where = f" (line {lines[-1]})" if lines else ""
    return " ".join(f"{type(error).__name__}: {error}".split()) + where


def child(request: dict[str, Any], function: Any, folder: str, out: int, result: int, isolate: Any) -> None:
    """Give up everything, call the function, write the result. Never returns."""
    code = 0
    reply: dict[str, Any]
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        kept = os.dup2(result, 3, inheritable=False) if result != 3 else 3
        os.closerange(4, 4096)
        os.chdir(folder)
        os.environ.update(HOME=folder, TMPDIR=folder)
        tempfile.tempdir = folder
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", errors="replace", closefd=False)
        sys.stderr = sys.stdout
        enforced = isolate.give_up(folder, request["readable"], request["memory"], request["seconds"])
        try:
            probing = request.get("probe", False)
            reply = {"value": probe(enforced) if probing else function(**request["arguments"])}
        except BaseException as error:
            reply = {"error": describe(error)}
        sys.stdout.flush()
        with open(kept, "wb", closefd=False) as stream:
            stream.write(json.dumps(reply, default=repr).encode())
    except MemoryError:
        code = _RUN_OUT
    except BaseException:
        code = 1
    finally:
        os._exit(code)


def probe(enforced: set[str]) -> list[str]:
    """Which of the restrictions hold, found by trying."""
    import socket

    tries: dict[str, Any] = {
        "network": lambda: socket.socket().close(),
        "files": lambda: open(Path(__file__).parent / "earnest-probe", "w").close(),
        "processes": lambda: os.fork() or os._exit(0),
        "memory": lambda: bytearray(1 << 40),
    }
    return sorted(name for name, attempt in tries.items() if name in enforced and refused(attempt))


def refused(attempt: Any) -> bool:
    try:
        attempt()
    except (OSError, MemoryError):
        return True
    return False


def call(request: dict[str, Any], function: Any, isolate: Any) -> dict[str, Any]:
    """Fork, read what the child prints and returns, end it at its limits."""
    folder = tempfile.mkdtemp(prefix="earnest-tool-")
    out_read, out_write = os.pipe()
    result_read, result_write = os.pipe()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        child(request, function, folder, out_write, result_write, isolate)
    os.close(out_write)
    os.close(result_write)
    try:
        error, output, result = gather(pid, out_read, result_read, started + request["seconds"], request["output"])
    finally:
        os.close(out_read)
        os.close(result_read)
        _, status = os.waitpid(pid, 0)
        remove(folder)
    reply: dict[str, Any] = {"output": output.decode(errors="replace"), "seconds": time.monotonic() - started}
    if error:
        reply["error"] = error
    elif os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0 and result:
        reply.update(parsed(result))
    elif os.WIFEXITED(status) and os.WEXITSTATUS(status) == _RUN_OUT:
        reply["error"] = "MemoryError: it needs more memory than it may have"
    elif os.WIFSIGNALED(status):
        reply["error"] = f"it was ended by the signal {signal.Signals(os.WTERMSIG(status)).name}"
    else:
        reply["error"] = "it ended its process without a result"
    return reply


def parsed(result: bytes) -> dict[str, Any]:
    """``value`` or ``error`` of a result. The code that ran may have written it, so anything can be in it."""
    try:
        found = json.loads(result)
        json.dumps(found)
        return {"error": str(found["error"])} if "error" in found else {"value": found["value"]}
    except (ValueError, TypeError, KeyError, RecursionError):
        return {"error": "it wrote something else in place of its result"}


def gather(pid: int, out: int, result: int, deadline: float, most: int) -> tuple[str, bytes, bytes]:
    """(error, printed, result) of the child; it is killed with its process group in any case."""
    found = {out: bytearray(), result: bytearray()}
    error = ""
    with selectors.DefaultSelector() as waiting:
        for fd in found:
            waiting.register(fd, selectors.EVENT_READ)
        while waiting.get_map() and not error:
            left = deadline - time.monotonic()
            ready = waiting.select(max(left, 0)) if left > 0 else []
            if not ready:
                error = "it took longer than it may"
            for key, _ in ready:
                chunk = os.read(key.fd, _CHUNK)
                if not chunk:
                    waiting.unregister(key.fd)
                found[key.fd] += chunk
                if len(found[key.fd]) > most:
                    error = f"its {'output' if key.fd == out else 'result'} is longer than it may be"
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    return error, bytes(found[out][:most]), bytes(found[result])


def remove(folder: str) -> None:
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:  # a very deep tree
        subprocess.run(["rm", "-rf", folder], check=False)


def readable(paths: list[str]) -> list[str]:
    system = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
    own = [sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *paths]
    return [*sorted({os.path.realpath(p) for p in own if p}), *system]


def main() -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)  # whatever an imported module prints must not reach the replies
    spec = importlib.util.spec_from_file_location("isolation", Path(__file__).with_name("isolation.py"))
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    isolate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(isolate)
    while (request := read(requests)) is not None:
        try:
            sys.path[:] = request["paths"] or sys.path
            function = find(request["function"])
        except BaseException as error:
            write(replies, {"missing": describe(error)})
            continue
        request["readable"] = readable(request["paths"])
        write(replies, call(request, function, isolate))


if __name__ == "__main__":
    main()
