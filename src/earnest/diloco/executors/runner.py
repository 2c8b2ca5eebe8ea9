"""One ``earnest worker`` as a process of the machine that this runs on; what Ray's and Monarch's actors hold.

The process dies with its actor (Linux's parent-death signal), so an actor that is lost with its node or its driver
leaves no worker running.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

TAIL = 400
GRACE = 20.0
PARENT = "EARNEST_RUNNER"
"""The environment variable with the process id of the worker's parent."""
WORKER_SCRIPT = """
import ctypes, os, signal, sys
signal.pthread_sigmask(signal.SIG_SETMASK, [])  # an actor's runtime may block signals, and children inherit that
signal.signal(signal.SIGTERM, signal.SIG_DFL)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ["EARNEST_RUNNER"]):
        sys.exit("the process that started this worker is gone")
from earnest.cli import main
main(sys.argv[1:])
"""


class Runner:
    """Start, look, stop. ``words`` come after ``earnest``."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path(tempfile.mkstemp(prefix="earnest-worker-", suffix=".log")[1])

    def start(self, words: Sequence[str], env: Mapping[str, str]) -> int:
        """The process id of ``earnest WORDS`` under this interpreter."""
        assert self._process is None, "a runner runs one command"
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-c", WORKER_SCRIPT, *words],
                env={**os.environ, **env, PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        return self._process.pid

    def pid(self) -> int:
        """The process that holds this runner, not the worker's."""
        return os.getpid()

    def poll(self) -> tuple[int, str] | None:
        """(exit code, the end of its log) once it has ended."""
        assert self._process is not None, "start comes first"
        code = self._process.poll()
        return None if code is None else (code, self.tail())

    def tail(self) -> str:
        return " ".join(self._log.read_bytes()[-TAIL:].decode(errors="replace").split())

    def stop(self) -> None:
        """SIGTERM (a worker writes a checkpoint and ends), after some seconds SIGKILL."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
