"""A rank of a run of two ranks is killed at a random time; the run has to end, and a resumed run has to be the same.

    python benchmarks/kill_ranks.py [--kills 20] [--out benchmarks/results/kill_ranks.json]
    python benchmarks/kill_ranks.py --show          prints what is recorded

Every run trains ``nano`` for 6 steps with engine.shard=2 and a checkpoint after each step. One of its two ranks, chosen
at random, gets SIGKILL at a random time between its start and the end of an undisturbed run. Then the run has to end
by itself within a minute and name the rank, and ``--resume`` in one process has to write the lines of the undisturbed
run: the same steps, the same rewards, gradient norms within 0.1 %, and adapters that differ by less than 0.1 % of their
length. A run that was killed before it made its folder is started again instead. Kills that are recorded already are
not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SMALL = ["steps=6", "eval.prompts=4", "eval.every=0", "sampling.prompts_per_step=4", "checkpoint.every=1"]
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "earnest"]


def start(out: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [*LAUNCH, "run", "quickstart", "engine.shard=2", f"out={out}", *SMALL],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def ranks_of(launcher: subprocess.Popen[bytes]) -> dict[int, int]:
    """Rank → process id of the launcher's children, once both exist."""
    while launcher.poll() is None:
        found = {}
        for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
            try:
                environment = Path(f"/proc/{child}/environ").read_bytes().decode()
            except OSError:
                continue
            if own := re.search(r"(?:^|\0)RANK=(\d)\0", environment):
                found[int(own[1])] = int(child)
        if len(found) == 2:
            return found
        time.sleep(0.01)
    raise RuntimeError("the run ended before its ranks were there")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def continued(out: Path) -> None:
    """Resume in one process, or start again if there is no folder."""
    again = ["quickstart", f"out={out}", *SMALL]
    own = [str(out), "--resume", "engine.shard=1"] if (out / "run.json").exists() else again
    done = subprocess.run(
        [sys.executable, "-m", "earnest", "run", *own], capture_output=True, text=True, check=False, env=os.environ
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])


def differences(ours: Path, theirs: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    a, b = lines(ours), lines(theirs)
    same = [(x["kind"], x["step"], x.get("reward")) for x in a] == [(x["kind"], x["step"], x.get("reward")) for x in b]
    norms = [(x["grad_norm"], y["grad_norm"]) for x, y in zip(a, b, strict=False) if x["kind"] == y["kind"] == "step"]
    one, two = (load_file(f / "adapter" / "earnest_adapter.safetensors") for f in (ours, theirs))
    apart = sum(float((one[k].double() - two[k].double()).square().sum()) for k in two) ** 0.5
    length = sum(float(t.double().square().sum()) for t in two.values()) ** 0.5
    return {
        "same_steps_and_rewards": same,
        "gradient_norms": max(abs(x - y) / max(x, y, 1e-12) for x, y in norms),
        "adapter": apart / length,
    }


def named(rank: int, pid: int, log: Path, out: Path) -> str | None:
    """Who named the rank that was killed: the run, or only torchrun."""
    texts = [log.read_text(errors="replace")]
    texts += [path.read_text(errors="replace") for path in (out / "ranks").glob("*.log")]
    if any(f"rank {rank} (process {pid}) was killed" in text for text in texts):
        return "the run"
    return "torchrun" if re.search(rf"pid: {pid}\)|rank\s*:\s*{rank} ", texts[0]) else None


def kill(number: int, folder: Path, seconds: float, whole: Path) -> dict[str, Any]:
    chance = random.Random(number)
    out, log = folder / f"run-{number}", folder / f"log-{number}"
    launcher = start(out, log)
    rank, after = chance.randrange(2), chance.uniform(0, seconds)
    try:
        pids = ranks_of(launcher)
        time.sleep(after)
        if launcher.poll() is not None:  # it was faster than the undisturbed one
            shutil.rmtree(out)
            return kill(number, folder, seconds / 2, whole)
        steps = len(lines(out)) if (out / "metrics.jsonl").exists() else None
        os.kill(pids[rank], signal.SIGKILL)
        killed = time.monotonic()
        code = launcher.wait(timeout=120)
        ended = time.monotonic() - killed
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    who = named(rank, pids[rank], log, out)
    continued(out)
    found = {"rank": rank, "after": after, "lines": steps, "code": code, "ended_after": ended, "named_by": who}
    return found | differences(out, whole)


def good(one: dict[str, Any]) -> bool:
    ended = one["code"] != 0 and one["ended_after"] < 60 and one["named_by"] is not None
    return bool(ended and one["same_steps_and_rewards"] and one["gradient_norms"] < 1e-3 and one["adapter"] < 1e-3)


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| killed | runs | slowest end | rank named | resumed as undisturbed |", "|---|---|---|---|---|"]
    for name, own in (
        ("before the folder was made", [one for one in found if one["lines"] is None]),
        ("before the first step", [one for one in found if one["lines"] in (0, 1)]),
        ("later", [one for one in found if one["lines"] is not None and one["lines"] > 1]),
    ):
        if own:
            told, well = sum(one["named_by"] is not None for one in own), sum(map(good, own))
            slowest = max(one["ended_after"] for one in own)
            lines.append(f"| {name} | {len(own)} | {slowest:.1f} s | {told} | {well} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "kill_ranks.json")
    parser.add_argument("--show", action="store_true", help="print what is recorded, and kill nothing")
    given = parser.parse_args()
    if given.show:
        print(table(json.loads(given.out.read_text())["kills"]))
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        whole = folder / "undisturbed"
        launcher = start(whole, folder / "log")
        ranks_of(launcher)
        began = time.monotonic()
        if launcher.wait(timeout=600):
            raise RuntimeError((folder / "log").read_text()[-3000:])
        seconds = time.monotonic() - began
        known = json.loads(given.out.read_text()) if given.out.is_file() else {"kills": []}
        found: list[dict[str, Any]] = known["kills"]
        for number in range(len(found), given.kills):
            found.append(kill(number, folder, 0.9 * seconds, whole))
            print(json.dumps(found[-1]), flush=True)
            record = {"undisturbed_seconds": seconds, "kills": found, "good": sum(map(good, found))}
            given.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(found))
    sys.exit(0 if all(map(good, found)) else 1)


if __name__ == "__main__":
    main()
