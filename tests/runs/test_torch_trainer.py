"""Ranks that Ray's TorchTrainer starts train as one process does."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.runs.test_ranks import ROOT, SMALL, lines

pytestmark = [pytest.mark.slow, pytest.mark.processes]  # a Ray, and two workers that import torch each


def test_two_ranks_of_a_torch_trainer_train_as_one_process(tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    small = [*(w for w in SMALL if not w.startswith("steps")), "steps=2"]
    path = os.pathsep.join(str(ROOT / part) for part in ("src", "earnest-audit/src", ""))
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as sessions:  # a socket's path must be short
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": sessions}
        env["RAY_raylet_start_wait_time_s"] = "240"  # of a machine that also does other work
        started = ["-m", "tests.runs.torch_trainer", str(tmp_path / "ray"), "engine.shard=2", f"out={two}"]
        for words in (started, ["-m", "earnest", "run", "quickstart", f"out={one}"]):
            command = [sys.executable, *words, *small]
            done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = [[line for line in lines(folder) if line["kind"] == "step"] for folder in (two, one)]
    assert [len(found) for found in steps] == [2, 2]
    for ours, theirs in zip(*steps, strict=True):
        assert ours["reward"] == theirs["reward"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
        assert "base in 2 shards" in ours["layout"] and "shards" not in theirs["layout"]
    assert (two / "ranks" / "rank-1.log").exists()
