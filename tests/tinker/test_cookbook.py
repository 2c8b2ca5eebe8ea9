"""Three unmodified tinker-cookbook recipes, in their own environment, against `earnest serve` in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environments import ROOT, python_of


@pytest.mark.slow
def test_three_recipes_run_to_their_end(tmp_path: Path) -> None:
    python_of("cookbook")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "cookbook.py"), "--small", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("chat_sl", "math_rl", "prompt_distillation"):
        printed = (tmp_path / f"{name}.txt").read_text()
        assert "Training completed successfully" in printed
        assert "sampler_weights/final" in printed
        metrics = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert any(m.get("update_l2:mean", 0) > 0 for m in metrics), "nothing was trained"
        if name == "math_rl":  # the cookbook's own check that sampler and trainer are the same policy
            assert all(abs(m["optim/kl_sample_train_v1"]) < 1e-4 for m in metrics if "optim/kl_sample_train_v1" in m)
        else:
            nll = [m["train_mean_nll"] for m in metrics if "train_mean_nll" in m]
            assert nll[-1] < nll[0]
