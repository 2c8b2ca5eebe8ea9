"""Processes that share the base and the rows compute what one process computes. One group runs all checks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from earnest.engines import AdamW
from earnest.engines.mesh import Mesh
from earnest.engines.muon import Muon
from earnest.engines.optimizers import AdamW8bit
from earnest.engines.tensor import plan_of
from earnest.engines.trained import refuse_whole_readers
from earnest.errors import ConfigError
from earnest.guards import Directions, Erase
from tests.engines.conftest import tiny_policy
from tests.engines.sharded_worker import CHECKS, SLOW, TENSOR, TENSOR_FEW

ROOT = Path(__file__).parents[2]


SOME = (
    "full_parameter_training_is_that_of_one_process",
    "a_rank_holds_its_share_of_a_model_that_is_trained_whole",
    "a_sharded_checkpoint_continues_on_another_number_of_ranks",
    "a_rank_without_rows_and_uneven_micro_batches",
    "a_rank_holds_its_share_of_the_base",
    "an_offloaded_base_trains_as_in_one_process",
    "a_checkpoint_continues_on_another_number_of_ranks",
)
"""The checks for four ranks in ``make test``; all of them run on two."""


def together(count: int, command: list[str], out: Path, settings: dict[str, str]) -> tuple[list[int], str]:
    """The exit codes of ``count`` ranks, and what they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    common = {**os.environ, **settings, "WORLD_SIZE": str(count), "PYTHONPATH": path}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    logs = [out / f"rank-{rank}.log" for rank in range(count)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            ranks.append(subprocess.Popen(command, env={**common, "RANK": str(rank)}, stdout=file, stderr=file))
    codes = [rank.wait(timeout=1500) for rank in ranks]
    return codes, "\n".join(log.read_text()[-3000:] for log in logs)


def run(
    out: Path, count: int, checks: tuple[str, ...] = (), replicate: int = 1, tensor: int = 1, long: bool = True
) -> list[dict[str, str]]:
    """What each of ``count`` ranks found. ``long``: with more steps and more examples of adapters."""
    command = [sys.executable, "-m", "tests.engines.sharded_worker", str(out), *checks]
    settings = {"REPLICATE": str(replicate), "TENSOR": str(tensor), "LONG": str(int(long))}
    codes, printed = together(count, command, out, settings)
    assert codes == [0] * count, printed
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(count)]


def require(results: list[dict[str, str]], names: tuple[str, ...]) -> None:
    for name in names:
        for rank, found in enumerate(results):
            assert found.get(name, "an earlier check failed") == "holds", f"{name}, rank {rank}: {found.get(name)}"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(tmp_path_factory.mktemp("ranks"), 2, long=False)


@pytest.mark.parametrize("name", [*CHECKS, *(f"split layers: {name}" for name in TENSOR_FEW)])
def test_two_ranks(results: list[dict[str, str]], name: str) -> None:
    require(results, (name,))


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    require(run(tmp_path, 4, SOME), SOME)


@pytest.mark.slow
def test_all_checks_on_four_ranks_and_on_two_copies_of_two(tmp_path: Path) -> None:
    for copies in (1, 2):
        (out := tmp_path / str(copies)).mkdir()
        require(run(out, 4, replicate=copies), tuple(CHECKS))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_every_adapter_with_every_term(tmp_path: Path, count: int) -> None:
    require(run(tmp_path, count, tuple(SLOW)), tuple(SLOW))


@pytest.mark.slow
def test_two_ranks_that_share_every_layer(tmp_path: Path) -> None:
    require(run(tmp_path, 2, tuple(TENSOR), tensor=2), tuple(TENSOR))


@pytest.mark.slow
@pytest.mark.parametrize("replicate", [1, 2])
def test_teams_of_two_ranks_that_share_every_layer(tmp_path: Path, replicate: int) -> None:
    """Four ranks: 2 shards or 2 copies of the base × 2 parts of each layer."""
    require(run(tmp_path, 4, tuple(TENSOR), replicate=replicate, tensor=2), tuple(TENSOR))


def test_a_rank_ends_while_a_thread_of_its_group_still_drops_a_tensor(tmp_path: Path) -> None:
    program = """
import time, torch, torch.distributed as dist
from earnest.engines.mesh import Mesh

class Slow:
    def __del__(self):
        start = time.perf_counter()
        while time.perf_counter() - start < 0.5: pass

mesh = Mesh.start(shard=2)
group = dist.group.WORLD  # while it is referred to, its threads live
for last in (False, True):
    value = torch.ones(10)
    value.attribute = None if last else Slow()
    work = dist.all_reduce(value, async_op=True)
    del value
work.wait()
"""
    (tmp_path / "program.py").write_text(program)
    codes, logs = together(2, [sys.executable, str(tmp_path / "program.py")], tmp_path, {})
    assert codes == [0, 0], logs


def test_models_and_numbers_of_ranks_that_cannot_share_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor: 3 ranks cannot share .* of tiny equally; take one of 1, 2"):
        plan_of(tiny_policy(), 3)
    other = tiny_policy()
    other.model.config.base_model_tp_plan = None
    with pytest.raises(ConfigError, match=r"engine\.tensor: LlamaForCausalLM has no plan for tensor parallelism"):
        plan_of(other, 2)
    other.model.config.base_model_tp_plan = {"layers.*.mlp.gate_proj": "packed_colwise"}
    with pytest.raises(ConfigError, match=r"engine\.tensor: the plan of tiny has the style 'packed_colwise'"):
        plan_of(other, 2)


def test_the_number_of_processes_has_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2 -m earnest run"):
        Mesh.start(shard=2)
    assert Mesh.start().size == 1


def test_what_reads_whole_tensors_is_refused_with_sharded_parameters() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.kind: adamw8bit reads whole tensors"):
        refuse_whole_readers(AdamW8bit(), None)

    class Own(Erase):  # a guard of a user
        set_parts = None  # type: ignore[assignment]

    given = {"a": torch.eye(2)}
    guard = Own(Directions(given, {"a": torch.ones(2)}))
    with pytest.raises(ConfigError, match=r"guard: Own reads whole updates"):
        refuse_whole_readers(AdamW(), guard)
    refuse_whole_readers(Muon(), Erase(guard.directions))


def test_rows_are_dealt_by_tokens_and_every_row_once() -> None:
    units, sizes = [[0, 3], [1], [2], [4, 5]], [30, 20, 12, 2]
    dealt = [Mesh(rank, 2).deal(units, sizes) for rank in range(2)]
    assert sorted(dealt[0] + dealt[1]) == [0, 1, 2, 3, 4, 5]
    assert dealt == [[0, 3, 4, 5], [1, 2]] or dealt == [[0, 3], [1, 2, 4, 5]]
