"""Runs of `earnest run` as parts of a job: started or resumed in a process of their own, and read from their folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from earnest.config import text
from experiments.evidence.jobs import Record


def earnest(*words: str | Path) -> None:
    """One command of `earnest`; an error ends the driver with the command's own message above it."""
    subprocess.run([sys.executable, "-m", "earnest", *map(str, words)], check=True)


def finish(folder: Path, config: dict[str, Any]) -> Path:
    """The run in ``folder``, finished: as it is, resumed, or started with this config."""
    record = folder / "run.json"
    if not record.exists():
        recipe = folder.with_suffix(".yaml")
        recipe.parent.mkdir(parents=True, exist_ok=True)
        recipe.write_text(text.spell(config))
        earnest("run", recipe, f"out={folder}")
    elif json.loads(record.read_text())["status"] != "finished":
        earnest("run", folder, "--resume")
    return folder


def read(folder: Path) -> Record:
    """Held-out rewards with their standard errors and solved rates by step, and numbers of every step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evals = [line for line in lines if line["kind"] == "eval"]
    steps = [line for line in lines if line["kind"] == "step"]
    return {
        "heldout": [(e["step"], e["reward"], e["se"], e["correct"]) for e in evals],
        "reward": [s["reward"]["mean"] for s in steps],
        "entropy": [s["metrics"].get("entropy") for s in steps],
        "step_seconds": [sum(s["seconds"].values()) for s in steps],
    }


def merged(folder: Path) -> Path:
    """The run's policy as a Hugging Face folder."""
    place = folder / "export" / "merged"
    if not place.exists():
        earnest("export", folder)
    return place
