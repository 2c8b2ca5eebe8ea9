"""Call Python functions and code in a process that can harm nothing: limits of time, memory and output, no network, no
new processes, no files outside a scratch folder.

    sandbox = Sandbox()
    sandbox.run("print(6 * 7)").output                     # '42\\n'
    sandbox.call(my_tool, {"city": "Rome"}).value

A call that fails, takes too long or is killed gives an ``CallResult`` with an ``error``. Only a function that cannot be
imported raises: that is a mistake in the tool, not in its call. Each call gets a fresh child of a worker process, so no
call sees what another one left behind.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from earnest.errors import EarnestError
from earnest.tasks import sandbox_worker as wire

_log = logging.getLogger(__name__)
_WORKER = Path(wire.__file__)
_GRACE = 10.0
"""Seconds after a call's time limit until its worker counts as lost."""
PROTECTIONS = frozenset({"memory", "files", "network", "processes"})
"""What a sandbox restricts where the system can, besides time and output."""


class SandboxError(EarnestError):
    """The sandbox cannot be used as asked on this system."""


@dataclass(frozen=True)
class Limits:
    """The limits of one call. ``output`` bounds what it prints and its result, each; ``memory`` each file, too."""

    seconds: float = 5.0
    memory: int = 512 * 2**20
    output: int = 2**16

    def __post_init__(self) -> None:
        for name in ("seconds", "memory", "output"):
            if not getattr(self, name) > 0:
                raise SandboxError(f"{name}={getattr(self, name)}: a limit must be greater than 0.")


@dataclass(frozen=True)
class CallResult:
    """The result of a call: ``value`` (JSON data), what was printed, and one sentence in ``error`` if it failed."""

    value: Any = None
    output: str = ""
    error: str = ""
    seconds: float = 0.0


class Sandbox:
    """Workers that are started when they are needed and used again; safe to call from several threads. unprotected:
    what to do where the system cannot restrict files, network, processes or memory: ``refuse``, or ``warn`` once and go
    on."""

    def __init__(self, limits: Limits | None = None, *, unprotected: Literal["refuse", "warn"] = "refuse") -> None:
        self.limits = limits or Limits()
        missing = PROTECTIONS - protections()
        if missing:
            text = f"this system cannot restrict {' and '.join(sorted(missing))} of a tool"
            if unprotected == "refuse":
                raise SandboxError(
                    f"{text}; use Linux 6.2 or newer on x86-64 or arm64, or Sandbox(unprotected='warn') for code that "
                    "you trust."
                )
            _log.warning("%s; run only code that you trust", text)

    def run(self, code: str, limits: Limits | None = None) -> CallResult:
        """Run Python code as a script."""
        return self._call("", ":run_code", {"code": code}, limits)

    def call(
        self, function: Callable[..., Any] | str, arguments: Mapping[str, Any], limits: Limits | None = None
    ) -> CallResult:
        """Call a function with JSON arguments. It must be a module's own function, so that the worker can import it.
        function: the function, or ``module:name``, or ``file.py:name``."""
        entry = function if isinstance(function, str) else entry_of(function)
        return self._call(entry.rpartition(":")[0], entry, arguments, limits)

    def _call(self, place: str, entry: str, arguments: Mapping[str, Any], limits: Limits | None) -> CallResult:
        limits = limits or self.limits
        paths = [os.path.abspath(p) for p in sys.path] if place else []
        if place.endswith(".py"):
            paths.append(str(Path(place).parent))
        reply = _POOL.call(place, _request(limits, entry, arguments, paths), limits.seconds + _GRACE)
        if "missing" in reply:
            raise SandboxError(f"the tool {entry} cannot be imported in the sandbox: {reply['missing']}.")
        shown = {
            "it took longer than it may": f"it took longer than {limits.seconds:g} seconds",
            "its output is longer than it may be": f"it printed more than {limits.output} bytes",
            "its result is longer than it may be": f"its result has more than {limits.output} bytes",
        }
        error = str(reply.get("error", ""))
        return CallResult(reply.get("value"), reply["output"], shown.get(error, error), reply["seconds"])


def _request(limits: Limits, entry: str, arguments: Mapping[str, Any], paths: list[str]) -> dict[str, Any]:
    return {"function": entry, "arguments": dict(arguments), "paths": paths, **asdict(limits)}


def entry_of(function: Callable[..., Any]) -> str:
    """``module:name`` or ``file.py:name``, by which another process finds a function."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", ""))
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if module is None or found is not function:
        raise SandboxError(
            f"{name or function!r} cannot be called in another process: a tool must be a function at the top level of "
            "a module or file."
        )
    file = getattr(module, "__file__", None)
    importable = module.__spec__ is not None and not module.__name__.startswith("earnest_import_")
    return f"{module.__name__}:{name}" if importable and module.__name__ != "__main__" else f"{file}:{name}"


@functools.cache
def protections() -> frozenset[str]:
    """What the sandbox restricts on this system, besides time and output, found by trying in a worker."""
    if os.name != "posix":
        raise SandboxError("tools run in a sandbox, which needs Linux or another Unix; this is another system.")
    request = _request(Limits(), ":run_code", {}, []) | {"probe": True}
    return frozenset(_POOL.call("", request, 30.0).get("value") or ())


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls) -> _Worker:
        quiet = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "RAYON")}
        # A tool has no use for the rest of the environment: tokens and keys of services among others.
        kept = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
        process = subprocess.Popen(
            [sys.executable, "-I", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={name: os.environ[name] for name in kept if name in os.environ} | quiet,
        )
        return cls(process)

    def call(self, request: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        """The worker's reply, or None if it died or did not reply in time."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError, ValueError, RecursionError), selectors.DefaultSelector() as waiting:
            wire.write(self.process.stdin, request)
            waiting.register(self.process.stdout, selectors.EVENT_READ)
            if waiting.select(seconds):
                return wire.read(self.process.stdout)
        return None

    def end(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class _Pool:
    """Idle workers by the module that they have imported; code runs in workers that have imported nothing."""

    idle: dict[str, list[_Worker]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    owner: int = field(default_factory=os.getpid)

    def call(self, place: str, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        with self.lock:
            if self.owner != os.getpid():  # after a fork: the workers belong to the parent
                self.owner, self.idle = os.getpid(), {}
            ready = self.idle.setdefault(place, [])
            worker = ready.pop() if ready else None
        worker = worker or _Worker.start()
        reply = worker.call(request, seconds)
        if reply is None:
            worker.end()
            return {"output": "", "seconds": seconds, "error": "its process was lost"}
        with self.lock:
            self.idle[place].append(worker)
        return reply

    def close(self) -> None:
        with self.lock:
            workers = [w for ready in self.idle.values() for w in ready] if self.owner == os.getpid() else []
            self.idle.clear()
        for worker in workers:
            worker.end()


_POOL = _Pool()
atexit.register(_POOL.close)
