"""A sampler in a process of this machine: requests and answers are pickled through a pipe.

The process ends when the pipe is closed, so it does not outlive a trainer that is killed.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from earnest.engines.local import LocalEngine
from earnest.errors import EarnestError, SamplingError
from earnest.models import SampleSpec
from earnest.rollouts.rollout import Rollout
from earnest.sync.base import SamplerEngine, SamplerLost, Weights


class ProcessSampler:
    """The trainer's side. ``make`` builds the engine in the process; it is pickled, so it is a function of a module."""

    plain: bool | None = None

    def __init__(self, number: int, make: Callable[[], LocalEngine]) -> None:
        self.place, self._make = f"sampler process {number}", make
        self.restart()

    def restart(self) -> None:
        own, theirs = Pipe()
        command = [sys.executable, "-m", "earnest.sync.process", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.DEVNULL)
        theirs.close()
        self._pipe: Connection[Any, Any] = own
        _send(self._pipe, self._make)

    def push(self, weights: Weights) -> None:
        self._ask("push", weights.version, dict(weights.state))

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        return list(self._ask("score", [list(r) for r in rows]))

    def sample(self, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        return list(self._ask("sample", [list(p) for p in prompts], n, spec))

    def close(self) -> None:
        self._pipe.close()
        self.process.kill()
        self.process.wait()

    def _ask(self, what: str, *given: Any) -> Any:
        try:
            _send(self._pipe, (what, given))
            error, found = _receive(self._pipe)
        except (EOFError, OSError) as error:
            self.process.kill()
            code = self.process.wait()
            raise SamplerLost(f"{self.place} is gone (exit code {code}): {error}") from None
        if error is not None:
            raise SamplingError(f"{self.place}: {error}")
        return found


def serve(pipe: Connection[Any, Any]) -> None:
    """In the process: build the engine, then answer until the pipe is closed."""
    engine = SamplerEngine(_receive(pipe)())
    while True:
        try:
            what, given = _receive(pipe)
        except (EOFError, OSError):
            return
        try:
            found, problem = getattr(engine, what)(*given), None
        except EarnestError as error:
            found, problem = None, str(error)
        _send(pipe, (problem, found))


def _send(pipe: Connection[Any, Any], what: Any) -> None:
    """Tensors by value: torch's own pickler would share their memory, which ends with the process."""
    pipe.send_bytes(pickle.dumps(what))


def _receive(pipe: Connection[Any, Any]) -> Any:
    return pickle.loads(pipe.recv_bytes())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    serve(Connection(int(sys.argv[1])))
