"""Ray's and Monarch's executors for real: exit codes, the end of the output, a lost actor, a stop that leaves no
process.

The commands are quick ones of `earnest` itself; whole runs on both are in test_runs.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from earnest.diloco.executors import Executor, ExecutorError, Exit, Job, get_executor

LIMIT = 240.0


@dataclass(frozen=True)
class Quick(Job):
    """Replica 0 prints the help and ends well, 1 asks for something unknown, others wait for a pipe's other end."""

    def words(self, replica: int) -> list[str]:
        return [["--help"], ["objectives", "nonsense"]][replica] if replica < 2 else ["replay", self.url]


def wait_for(executor: Executor, count: int) -> list[Exit]:
    ends: list[Exit] = []
    limit = time.monotonic() + LIMIT
    while len(ends) < count:
        assert time.monotonic() < limit, f"only {ends} ended"
        ends += executor.poll()
        time.sleep(0.1)
    return sorted(ends, key=lambda e: e.replica)


def children(pipe: Path) -> list[int]:
    """Processes whose command line names the pipe."""
    found = []
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # it ended while we looked
            if str(pipe) in words:
                found.append(int(place.name))
    return found


def gone(pipe: Path) -> bool:
    limit = time.monotonic() + LIMIT
    while children(pipe):
        if time.monotonic() > limit:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A process that reads it waits, since nothing writes to it."""
    place = tmp_path / "pipe.jsonl"
    os.mkfifo(place)
    return place


@pytest.fixture(params=["ray", "monarch"])
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """On a machine of which Ray and Monarch believe that it has three GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 3}')
    made = get_executor(request.param)
    yield made
    made.stop()


@pytest.mark.processes
def test_codes_words_restarts_and_the_end(executor: Any, pipe: Path) -> None:
    """One session of each, since starting one is slow."""
    job = Quick(str(pipe), 3, {"EARNEST_TEST": "1"}, gpu=True)
    for replica in range(3):
        executor.start(job, replica, 1)
    first, second = wait_for(executor, 2)
    assert (first.replica, first.attempt, first.code) == (0, 1, 0)
    assert (second.replica, second.code) == (1, 2) and "objective 'nonsense' is unknown" in second.detail
    executor.start(job, 1, 2)
    (again,) = wait_for(executor, 1)
    assert (again.replica, again.attempt, again.code) == (1, 2, 2), "a replica that ended can be started again"

    assert executor.poll() == [], "the third still waits"
    (worker,) = children(pipe)
    own = dict(line.partition("=")[::2] for line in Path(f"/proc/{worker}/environ").read_text().split("\0"))
    assert own["EARNEST_TEST"] == "1"
    assert own["CUDA_VISIBLE_DEVICES"] in (("6",) if executor.name == "monarch" else ("4", "5", "6")), (
        "a GPU of its own"
    )
    os.kill(worker, signal.SIGKILL)
    (killed,) = wait_for(executor, 1)
    assert (killed.replica, killed.code) == (2, -signal.SIGKILL)

    executor.start(job, 2, 2)
    limit = time.monotonic() + LIMIT
    while not children(pipe):
        assert time.monotonic() < limit
        time.sleep(0.05)
    (worker,) = children(pipe)
    parent = int(Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(parent, signal.SIGKILL)  # the actor, as when its node is lost
    (lost,) = wait_for(executor, 1)
    assert (lost.replica, lost.attempt, lost.code) == (2, 2, -9) and "its actor is gone" in lost.detail
    assert gone(pipe), "a worker dies with its actor"

    executor.start(job, 2, 3)
    executor.stop()
    assert gone(pipe), "stop leaves nothing behind"


def test_wrong_addresses_and_names_of_clusters_are_refused() -> None:
    with pytest.raises(ExecutorError, match="is not an address; write tcp://HOST:PORT"):
        get_executor("monarch:nohost")
    with pytest.raises(ExecutorError, match=r"--on rai: executor 'rai' is unknown: did you mean 'ray'"):
        get_executor("rai")
    far = get_executor("ray:ray://127.0.0.1:9")
    with pytest.raises(ExecutorError, match="which only this machine can reach; give a bucket"):
        far.start(Job("file:///tmp/run", 1), 0, 1)
