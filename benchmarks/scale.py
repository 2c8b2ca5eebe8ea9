"""A training step in 1 process and in 2 that share one base: seconds, bytes held, bytes sent.

    python benchmarks/scale.py [--model smollm2] [--steps 3] [--out benchmarks/results/scale.json]
    python benchmarks/scale.py --show          prints what is recorded

LoRA r = 8 on all linear layers, 4 prompts × 4 completions, 48 + 32 tokens, padded. ``2 ranks`` are started by torchrun
(gloo on CPUs, nccl on GPUs) with engine.shard=2; each computes half of the rows. ``held`` are the bytes of parameters
that a rank holds between steps, ``sent`` the bytes that it receives per step on paper. ``cost of sharding`` is ranks ×
seconds, compared with 1 rank: 0 % would mean that 2 ranks need half the time. Each rank has one thread on a CPU; on a
machine with fewer cores than ranks the time has little meaning. The JSON has the load.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def measure(model: str, steps: int, ranks: int) -> dict[str, Any]:
    """This rank's numbers."""
    import torch

    import earnest as en
    from earnest.engines.mesh import Mesh
    from earnest.engines.sharding import held_bytes

    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    mesh = Mesh.start(shard=ranks)
    policy = en.load(model)
    base = held_bytes(policy.model)
    adapter = en.attach(policy, en.LoRA(rank=8), targets="all-linear")
    engine = en.LocalEngine(policy, adapter, pack=False, mesh=mesh)
    g = torch.Generator().manual_seed(0)

    def tokens(n: int) -> list[int]:
        return torch.randint(3, policy.head.weight.shape[0], (n,), generator=g).tolist()

    prompts = [tokens(48) for _ in range(4)]
    batch = en.Batch.from_rows(
        [p for p in prompts for _ in range(4)], [tokens(32) for _ in range(16)], role="demonstration"
    )
    engine.step(batch, en.SFT())
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        report = engine.step(batch, en.SFT())
        seconds.append(time.perf_counter() - start)
    trained = sum(4 * p.numel() for p in engine.parameters)
    sent = round(2 * base * (ranks - 1) / ranks + 2 * trained * (ranks - 1) / ranks)
    held = held_bytes(policy.model)
    return {"ranks": ranks, "seconds": min(seconds), "held": held, "sent": sent, "loss": report.loss, "base": base}


def start(model: str, steps: int, ranks: int) -> dict[str, Any]:
    own = [__file__, "--worker", str(ranks), "--model", model, "--steps", str(steps)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*torchrun, *own] if ranks > 1 else [sys.executable, *own]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
    line = next(x for x in done.stdout.splitlines() if x.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    return found


def table(found: list[dict[str, Any]]) -> str:
    head = "| ranks | seconds per step | cost of sharding | parameters held | received per step | loss |"
    lines = [head, "|---|---|---|---|---|---|"]
    for one in found:
        held, sent = (f"{one[key] / 1e6:,.1f} MB" for key in ("held", "sent"))
        cost = one["ranks"] * one["seconds"] / found[0]["seconds"] - 1
        lines.append(f"| {one['ranks']} | {one['seconds']:.2f} | {cost:+.0%} | {held} | {sent} | {one['loss']:.6f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "scale.json")
    parser.add_argument("--show", action="store_true", help="print what is recorded, and measure nothing")
    given = parser.parse_args()
    if given.show:
        print(table(json.loads(given.out.read_text())["runs"]))
        return
    if given.worker:
        found = measure(given.model, given.steps, given.worker)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found))
        return
    every = [start(given.model, given.steps, ranks) for ranks in (1, 2)]
    cost = every[1]["seconds"] / every[0]["seconds"]
    record = {"model": given.model, "runs": every, "times": cost, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(every))
    print(f"\n2 ranks take {cost:.2f} times the time of 1 on {os.cpu_count()} cores (load {os.getloadavg()[0]:.1f})")


if __name__ == "__main__":
    main()
