"""A run of two ranks: one folder, one line per step, and a rank that dies ends it with one sentence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from earnest.config import from_mapping
from earnest.config.recipes import read
from earnest.engines.mesh import Mesh
from earnest.errors import ConfigError, EarnestError
from earnest.runs import ranks

ROOT = Path(__file__).parents[2]
SMALL = ["steps=8", "eval.prompts=4", "eval.every=0", "sampling.prompts_per_step=4", "checkpoint.every=2"]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def settings(folder: Path) -> dict[str, Any]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "EARNEST_TEST": str(folder)}


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(p) for p in found.stdout.split()]


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_and_one_process_continues_it(tmp_path: Path) -> None:
    out, undisturbed = tmp_path / "two", tmp_path / "one"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "earnest"]
    command = [*start, "run", "quickstart", "engine.shard=2", f"out={out}", *SMALL]
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(command, env=settings(out), stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while not (out / "checkpoints" / "step-000002").exists():
            assert launcher.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.05)
        second = next(p for p in children(launcher.pid) if b"RANK=1\0" in Path(f"/proc/{p}/environ").read_bytes())
        os.kill(second, signal.SIGKILL)
        killed = time.monotonic()
        assert launcher.wait(timeout=60) != 0
        assert time.monotonic() - killed < 60
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    told = (tmp_path / "log").read_text()
    assert f"rank 1 (process {second}) was killed" in told, told[-3000:]
    assert "rank 1" in (out / "events.log").read_text()
    one = [sys.executable, "-m", "earnest", "run"]
    for rest in ([str(out), "--resume", "engine.shard=1"], ["quickstart", f"out={undisturbed}", *SMALL]):
        done = subprocess.run([*one, *rest], env=settings(out), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = lines(out), lines(undisturbed)
    assert [(x["kind"], x["step"]) for x in ours] == [(x["kind"], x["step"]) for x in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a["reward"] == b["reward"], (a, b)  # the same completions, so the same weights to rounding
        if a["kind"] == "step":
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("override", "key"),
    [("sampler=http://127.0.0.1:1", "sampler"), ("sampling.workers=1", "sampling.workers"), ("replicas=2", "replicas")],
)
def test_what_several_ranks_do_not_support_is_refused(override: str, key: str) -> None:
    config = from_mapping(read("quickstart")[1], ["engine.shard=2", override])
    with pytest.raises(ConfigError, match=f"^{key}: is not supported with several ranks"):
        ranks.join(config)


def test_tensor_parallelism_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor"):
        from_mapping(read("quickstart")[1], ["engine.tensor=2"])


def test_the_reason_of_a_rank_that_failed_reaches_the_others(tmp_path: Path) -> None:
    here, other = Mesh(0, 2), Mesh(1, 2)
    here.notes = other.notes = tmp_path
    here._people = other._people = [("here", 1), ("elsewhere", 2)]
    with pytest.raises(ValueError, match="a grader"), other.explained():
        raise ValueError("a grader raised")
    with pytest.raises(EarnestError, match="rank 1 stopped: ValueError: a grader raised"), here.explained():
        raise RuntimeError("[gloo] Connection closed by peer")
    with pytest.raises(RuntimeError, match="something else"), here.explained():
        raise RuntimeError("something else")
