"""An asynchronous run whose samplers are killed 100 times and whose trainer is killed 20 times, all with SIGKILL.

    python benchmarks/sampler_kills.py                                 print the recorded table
    python benchmarks/sampler_kills.py --write [--samplers 100] [--trainer 20] [--steps 500]

The run is `earnest run quickstart` on nano with two sampler processes, `sampler.staleness` 2 and a checkpoint at every
step. In each session some sampler processes are killed at random moments, then the trainer; the next session is
`earnest run RUN --resume`. At the end rollouts.jsonl must have every step once, no batch twice, none left out and no
row older than the staleness, and `earnest run RUN --replay` must train it again bit for bit. ``--write`` writes
benchmarks/results/sampler_kills.json. A session whose samplers died three times in a row stops by itself, as it should,
and is resumed like the others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

STALENESS = 2
RESULTS = Path(__file__).parent / "results" / "sampler_kills.json"
SETTINGS = [
    "threads=1", "check=false", "eval.every=0", "eval.prompts=2", "eval.samples=2", "checkpoint.every=1",
    "sampling.prompts_per_step=4", "sampling.completions_per_prompt=8", f"sampler={{staleness: {STALENESS}, count: 2}}",
]  # fmt: skip
IN_A_ROW = "times in a row"


class Killed:
    """The run and what was killed so far."""

    def __init__(self, out: Path, given: argparse.Namespace) -> None:
        self.out, self.given, self.random = out, given, random.Random(given.seed)
        self.samplers = self.trainer = self.sessions = self.stopped = 0

    def session(self) -> bool:
        """Start or resume the run and kill; True: the run has ended."""
        words = ["quickstart", f"steps={self.given.steps}", f"out={self.out}", *SETTINGS]
        log = self.out.parent / f"session-{self.sessions}.log"
        with log.open("w") as file:
            run = earnest(*(words if not self.sessions else [str(self.out), "--resume"]), log=file)
        self.sessions += 1
        left = self.given.samplers - self.samplers
        sessions = self.given.trainer - self.trainer
        wanted = 0 if not sessions else -(-left // sessions)  # the last session is not disturbed
        seen: dict[int, int] = {}  # the number of recorded steps when a sampler's process was first seen
        while run.poll() is None:
            lines = steps(self.out)
            found = [p for p in children(run.pid) if seen.setdefault(p.pid, lines) < lines]
            if wanted and found:
                time.sleep(self.random.uniform(0.0, 0.3))
                self.random.choice(found).kill()
                self.samplers, wanted = self.samplers + 1, wanted - 1
            elif sessions and not wanted and any(lines > first for first in seen.values()):
                time.sleep(self.random.uniform(0.0, 1.0))
                if run.poll() is None:
                    own = children(run.pid)
                    run.kill()
                    run.wait()
                    psutil.wait_procs(own, timeout=60)
                    assert not [p for p in own if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], own
                    self.trainer += 1
                    return False
            time.sleep(0.02)
        if run.returncode:
            assert IN_A_ROW in (text := log.read_text()), text[-4000:]
            self.stopped += 1
        return run.returncode == 0


def earnest(*words: str, log: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "earnest.cli", "run", *words], stdout=log, stderr=log)


def children(trainer: int) -> list[psutil.Process]:
    """The trainer's sampler processes."""
    try:
        return [p for p in psutil.Process(trainer).children() if "earnest.sync.process" in p.cmdline()]
    except psutil.Error:
        return []


def steps(out: Path) -> int:
    """The number of recorded steps."""
    place = out / "rollouts.jsonl"
    return place.read_bytes().count(b"\n") if place.exists() else 0


def check(out: Path, wanted: int) -> dict[str, Any]:
    """What the record has; raises unless every batch was trained once, none was left out and no row was too old."""
    lines = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    batches = [line["batch"] for line in lines]
    assert [line["step"] for line in lines] == list(range(1, wanted + 1)), "a step is missing or there twice"
    assert len(set(batches)) == len(batches), "a batch was trained twice"
    assert set(range(wanted - STALENESS)) <= set(batches), "a batch was left out"
    ages, rows = [], 0
    for line in lines:
        found = [row["rollout"] for row in line["rows"]]
        places = [(r["prompt_index"], r["sample_index"]) for r in found]
        assert places == [(i, k) for i in range(4) for k in range(8)], "a row is missing or there twice"
        ages += [line["version"] - r["policy_version"] for r in found]
        rows += len(found)
    assert max(ages) <= STALENESS, "a row was too old"
    return {"steps": len(lines), "rows": rows, "oldest": max(ages), "mean_age": sum(ages) / len(ages)}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        killed = Killed(Path(scratch) / "run", given)
        while not killed.session():
            print(
                f"{killed.samplers} samplers, {killed.trainer} trainers killed; {steps(killed.out)} steps", flush=True
            )
        assert (killed.samplers, killed.trainer) == (given.samplers, given.trainer), "the run ended first; more --steps"
        found = check(killed.out, given.steps)
        again = Path(scratch) / "again"
        with (Path(scratch) / "replay.log").open("w") as log:
            assert earnest(str(killed.out), "--replay", f"out={again}", log=log).wait() == 0, "the replay differs"
        weights = Path("adapter") / "adapter_model.safetensors"
        assert (again / weights).read_bytes() == (killed.out / weights).read_bytes()
    return {
        "samplers_killed": killed.samplers,
        "trainer_killed": killed.trainer,
        "sessions": killed.sessions,
        "stopped": killed.stopped,
        "staleness": STALENESS,
        **found,
        "replays": True,
        "seconds": time.monotonic() - began,
        "seed": given.seed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--samplers", type=int, default=100)
    parser.add_argument("--trainer", type=int, default=20)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.write:
        given.out.write_text(json.dumps(measure(given), indent=1) + "\n")
    found = json.loads(given.out.read_text())
    print("| samplers killed | trainers killed | steps | rows trained | trained twice | lost | oldest row | replay |")
    print("|---|---|---|---|---|---|---|---|")
    print(
        f"| {found['samplers_killed']} | {found['trainer_killed']} | {found['steps']} | {found['rows']} | 0 | 0 | "
        f"{found['oldest']} of {found['staleness']} versions | bit for bit |"
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
