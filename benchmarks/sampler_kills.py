"""An asynchronous run whose samplers are killed 100 times and whose trainer is killed 20 times, all with SIGKILL.

    python benchmarks/sampler_kills.py                                 print the recorded table
    python benchmarks/sampler_kills.py --write [--samplers 100] [--trainer 20] [--steps 200] [--work FOLDER]

The run is `earnest run quickstart` on nano with two sampler processes, `sampler.staleness` 2 and a checkpoint at every
step. In each session some sampler processes are killed at random moments, then the trainer; the next session is
`earnest run RUN --resume`. A process is killed only after the run has recorded a step since that process started, so a
slow machine takes longer and does not change what is tested. Every kill is a line of FOLDER/kills.jsonl; with --work an
interrupted measurement continues from there. At the end rollouts.jsonl must have every step once, no batch twice, none
left out and no row older than the staleness, and `earnest run RUN --replay` must train it again bit for bit.
``--write`` writes benchmarks/results/sampler_kills.json. A session whose samplers died three times in a row stops by
itself, as it should, and is resumed like the others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
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
    """The run and what was killed so far, which is recorded in kills.jsonl."""

    def __init__(self, work: Path, given: argparse.Namespace) -> None:
        self.out, self.given, self.record = work / "run", given, work / "kills.jsonl"
        work.mkdir(parents=True, exist_ok=True)
        self.kills: list[dict[str, Any]] = []
        if self.record.exists():
            self.kills = [json.loads(line) for line in self.record.read_text().splitlines()]
        last = next((kill for kill in reversed(self.kills) if kill["kind"] != "sampler"), None)
        if last is not None and last["kind"] == "began":  # the measurement was interrupted in a session
            self._end(last["pid"])
            self.note("interrupted")

    def count(self, kind: str) -> int:
        return sum(kill["kind"] == kind for kill in self.kills)

    def note(self, kind: str, **more: int) -> None:
        line = {"kind": kind, "session": self.count("began"), "step": steps(self.out), "time": time.time(), **more}
        with self.record.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.kills.append(line)

    def _end(self, pid: int) -> None:
        """Kill this trainer, if it runs, and wait until its samplers have ended by themselves."""
        own = children(pid)
        try:
            trainer = psutil.Process(pid)
            if str(self.out) in " ".join(trainer.cmdline()):
                trainer.kill()
                trainer.wait()
        except psutil.NoSuchProcess:
            pass
        _, left = psutil.wait_procs(own, timeout=600)
        assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE], f"samplers of a killed trainer run: {left}"

    def session(self) -> bool:
        """Start or resume the run and kill; True: the run has ended."""
        resumes = any((self.out / "checkpoints").glob("step-*"))
        words = [str(self.out), "--resume"] if resumes else ["quickstart", f"steps={self.given.steps}", *SETTINGS]
        if not resumes:
            shutil.rmtree(self.out, ignore_errors=True)
            words.append(f"out={self.out}")
        number = self.count("began")
        chance = random.Random(f"{self.given.seed} {number}")
        log = self.out.parent / f"session-{number}.log"
        with log.open("w") as file:
            run = earnest(*words, log=file)
        self.note("began", pid=run.pid)
        sessions = self.given.trainer - self.count("trainer")
        left = self.given.samplers - self.count("sampler")
        wanted = 0 if not sessions else -(-left // sessions)  # the last session is not disturbed
        seen: dict[int, int] = {}  # the number of recorded steps when a sampler's process was first seen
        while run.poll() is None:
            lines = steps(self.out)
            found = [p for p in children(run.pid) if seen.setdefault(p.pid, lines) < lines]
            if wanted and found:
                time.sleep(chance.uniform(0.0, 0.3))
                chance.choice(found).kill()
                wanted -= 1
                self.note("sampler")
            elif sessions and not wanted and any(lines > first for first in seen.values()):
                time.sleep(chance.uniform(0.0, 1.0))
                if run.poll() is None:
                    self._end(run.pid)
                    run.wait()
                    self.note("trainer")
                    return False
            time.sleep(0.1)
        if run.returncode:
            assert IN_A_ROW in (text := log.read_text()), text[-4000:]
            self.note("stopped")
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


def measure(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    killed = Killed(work, given)
    ended = killed.count("ended")
    while not ended:
        ended = killed.session()
        print(
            f"{killed.count('sampler')} samplers, {killed.count('trainer')} trainers killed; {steps(killed.out)} steps",
            flush=True,
        )
        if ended:
            killed.note("ended")
    done = (killed.count("sampler"), killed.count("trainer"))
    assert done == (given.samplers, given.trainer), "the run ended first; more --steps"
    found = check(killed.out, given.steps)
    again = work / "again"
    shutil.rmtree(again, ignore_errors=True)
    with (work / "replay.log").open("w") as log:
        assert earnest(str(killed.out), "--replay", f"out={again}", log=log).wait() == 0, "the replay differs"
    weights = Path("adapter") / "adapter_model.safetensors"
    assert (again / weights).read_bytes() == (killed.out / weights).read_bytes()
    return {
        "samplers_killed": killed.count("sampler"),
        "trainer_killed": killed.count("trainer"),
        "sessions": killed.count("began"),
        "stopped": killed.count("stopped"),
        "interrupted": killed.count("interrupted"),
        "staleness": STALENESS,
        **found,
        "replays": True,
        "seconds": time.time() - killed.kills[0]["time"],
        "seed": given.seed,
        "kills": [[k["session"], k["kind"], k["step"]] for k in killed.kills if k["kind"] in ("sampler", "trainer")],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--samplers", type=int, default=100)
    parser.add_argument("--trainer", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--work", type=Path, help="the folder of the run; default: a temporary one")
    given = parser.parse_args()
    if given.write:
        with tempfile.TemporaryDirectory() as scratch:
            made = measure(given, given.work or Path(scratch) / "work")
        given.out.write_text(json.dumps(made) + "\n")
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
