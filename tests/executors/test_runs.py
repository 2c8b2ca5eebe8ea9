"""Whole runs: `earnest run … replicas=2 --on ray` and `--on monarch`, from the command to the report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.tiny import recipe, tiny_folder

SMALL = ["sampling={prompts_per_step: 2, completions_per_prompt: 4, max_new_tokens: 4}", "sync.every=2", "steps=4"]


@pytest.mark.slow
@pytest.mark.parametrize("on", ["ray", "monarch"])
def test_a_whole_run(on: str, tmp_path: Path) -> None:
    """Both replicas are in every round, and the launcher writes what a local run writes."""
    folder = tmp_path / "run"
    path = recipe(tmp_path / "r.yaml", tiny_folder(tmp_path / "tiny"))
    words = ["run", str(path), *SMALL, "replicas=2", "sync.quorum=2", "eval.every=0", f"out={folder}", "--on", on]
    done = subprocess.run([sys.executable, "-m", "earnest.cli", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out reward" in done.stdout
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [(line["step"], line["metrics"]["outer/members"]) for line in steps] == [(2, 2), (4, 2)]
    header = json.loads((folder / "run.json").read_text())
    assert header["on"] == on and header["status"] == "finished"
    assert (folder / "adapter" / "adapter_model.safetensors").exists() and (folder / "report.html").exists()
