"""Two processes that share the base and the rows compute what one process computes. One group runs all checks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import earnest as en
from earnest.engines.mesh import Mesh
from earnest.engines.sharding import shard
from earnest.errors import ConfigError
from tests.engines.conftest import tiny_policy
from tests.engines.sharded_worker import CHECKS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank found."""
    out = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": path}
    logs = [out / f"rank-{rank}.log" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "tests.engines.sharded_worker", str(out)]
        with log.open("w") as file:
            ranks.append(subprocess.Popen(command, env={**common, "RANK": str(rank)}, stdout=file, stderr=file))
    codes = [rank.wait(timeout=280) for rank in ranks]
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", list(CHECKS))
def test_two_ranks(results: list[dict[str, str]], name: str) -> None:
    for rank, found in enumerate(results):
        assert found.get(name, "an earlier check failed") == "holds", f"rank {rank}: {found.get(name)}"


def test_the_number_of_processes_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2 -m earnest run"):
        Mesh.start(shard=2)
    assert Mesh.start().size == 1


def test_modules_that_are_trained_whole_are_refused() -> None:
    policy = tiny_policy()
    adapter = en.attach(policy, en.Full())
    with pytest.raises(ConfigError, match=r"engine\.shard: full with modules that are trained whole"):
        shard(policy, adapter, Mesh(0, 2, 2))


def test_rows_are_dealt_by_tokens_and_every_row_once() -> None:
    units, sizes = [[0, 3], [1], [2], [4, 5]], [30, 20, 12, 2]
    dealt = [Mesh(rank, 2).deal(units, sizes) for rank in range(2)]
    assert sorted(dealt[0] + dealt[1]) == [0, 1, 2, 3, 4, 5]
    assert dealt == [[0, 3, 4, 5], [1, 2]] or dealt == [[0, 3], [1, 2, 4, 5]]
