"""The marker of tests that cross a process, and the check that a marked test does."""

from __future__ import annotations

import sys
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.posix_spawn"})
SERVERS = frozenset({"seaweed", "moto"})
"""Fixtures that hold a server in a process of its own, over several tests."""
STARTED = [0]


def register(config: pytest.Config) -> None:
    """Not in pyproject.toml: the marker means nothing outside the two folders that use it."""
    config.addinivalue_line("markers", "processes: crosses a process; tests/diloco/test_proof.py counts them")


def watch() -> None:
    """Count the processes that are started here, once for this interpreter."""

    def hook(event: str, _: Any) -> None:
        STARTED[0] += event in EVENTS

    start = BaseProcess.start

    def counted(self: Any) -> None:
        STARTED[0] += 1  # a fork server starts it elsewhere, without an event here
        start(self)

    sys.addaudithook(hook)
    BaseProcess.start = counted  # type: ignore[method-assign]
