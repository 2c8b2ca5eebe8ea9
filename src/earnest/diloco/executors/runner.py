"""One ``earnest worker`` as a process of this machine, started by the launcher or by an actor of Ray or Monarch.

The process dies with its parent (Linux's parent-death signal), so an actor that is lost with its node or its driver
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
    """Start, look, stop. The output is added to ``log``; with ``own_session`` Ctrl-C does not reach the process."""

    def __init__(self, log: Path | None = None, own_session: bool = False) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._own_session, self._asked = own_session, False
        self._log = log or Path(tempfile.mkstemp(prefix="earnest-worker-", suffix=".log")[1])

    def start(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        """Start ``earnest WORDS`` under this interpreter."""
        assert self.process is None, "a runner runs one command"
        with self._log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER_SCRIPT, *words],
                env={**os.environ, **env, PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=self._own_session,
            )

    def poll(self) -> tuple[int, str] | None:
        """(exit code, the end of its log) once it has ended."""
        assert self.process is not None, "start comes first"
        code = self.process.poll()
        if code is None:
            return None
        return code, " ".join(self._log.read_bytes()[-TAIL:].decode(errors="replace").split())

    def terminate(self) -> None:
        """SIGTERM, once: a worker writes a checkpoint and ends."""
        if self.process is not None and not self._asked:
            self._asked = True
            self.process.terminate()

    def stop(self) -> None:
        """SIGTERM, after some seconds SIGKILL."""
        self.terminate()
        if self.process is None:
            return
        try:
            self.process.wait(timeout=GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
