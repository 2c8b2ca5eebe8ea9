"""The vocabulary pass of a team of two ranks (engine.tensor=2): whole head and divided rows, or a divided vocabulary.

    python benchmarks/vocabulary_tensor.py [--out benchmarks/results/vocabulary_tensor.json]
    python benchmarks/vocabulary_tensor.py --show          prints what is recorded

Both ranks have the hidden states of all rows and need the log-prob of each target token and the gradient by all hidden
states. SmolLM2's sizes: 49,152 tokens, width 576, float32, 1,024 rows, one thread per rank, gloo. Per way:

    rows         a rank computes half of the rows with the whole head; log-probs and gradient are summed over the ranks
    vocabulary   a rank computes all rows with half of the head; the maximum, the sum of exponentials, the target's
                 logit and the gradient are exchanged (Megatron-LM, arXiv 1909.08053)

``entropy`` adds the entropy of each row to what is computed, as an entropy bonus needs it: one more exchange for the
divided vocabulary. ``seconds`` is the shortest of several passes of the slower rank and ``processor`` the least
processor time of such a pass, which depends less on other programs; the two ways take turns. ``exchanged`` are the
bytes that a rank gives to all-reduces in one pass, ``peak`` what torch's allocator held above the hidden states and the
head.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.packing import peak

RESULTS = Path(__file__).parent / "results"
VOCABULARY, WIDTH, ROWS, BLOCK = 49152, 576, 1024, 128
SENT = 0


def reduced(value: Tensor, op: Any = None) -> Tensor:
    global SENT
    SENT += value.numel() * value.element_size()
    dist.all_reduce(value, op or dist.ReduceOp.SUM)
    return value


def by_rows(hidden: Tensor, head: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    """Scalars [rows, 1 or 2] and the gradient of their sum by the hidden states, with the whole head."""
    half = len(hidden) // 2
    own = range(dist.get_rank() * half, (dist.get_rank() + 1) * half, BLOCK)
    scalars, gradient = torch.zeros(len(hidden), 1 + entropy), torch.zeros_like(hidden)
    for start in own:
        rows = slice(start, start + BLOCK)
        logits = hidden[rows] @ head.t()
        logits -= logits.amax(-1, keepdim=True)
        p = logits.exp()
        total = p.sum(-1, keepdim=True)
        p /= total
        logits -= total.log()
        scalars[rows, 0] = logits.gather(1, target[rows, None])[:, 0]
        if entropy:
            scalars[rows, 1] = h = -(p * logits).sum(-1)
            d = p.neg() - p * (logits + h[:, None])
        else:
            d = p.neg_()
        d.scatter_add_(1, target[rows, None], torch.ones(BLOCK, 1))
        gradient[rows] = d @ head
    return reduced(scalars), reduced(gradient)


def by_vocabulary(hidden: Tensor, part: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    """The same with this rank's half of the head."""
    first = dist.get_rank() * len(part)
    scalars, gradient = torch.zeros(len(hidden), 1 + entropy), torch.zeros_like(hidden)
    inside = (target >= first) & (target < first + len(part))
    place = (target - first).clamp(0, len(part) - 1)
    for start in range(0, len(hidden), 2 * BLOCK):  # as many logits at a time as by rows
        rows = slice(start, start + 2 * BLOCK)
        logits = hidden[rows] @ part.t()
        logits -= reduced(logits.amax(-1), dist.ReduceOp.MAX)[:, None]
        own = logits.gather(1, place[rows, None])[:, 0] * inside[rows]
        p = logits.exp()
        total, found = reduced(torch.stack([p.sum(-1), own]))
        p /= total[:, None]
        logits -= total.log()[:, None]
        scalars[rows, 0] = found - total.log()
        if entropy:
            scalars[rows, 1] = h = -reduced((p * logits).sum(-1))
            d = p.neg() - p * (logits + h[:, None])
        else:
            d = p.neg_()
        d.scatter_add_(1, place[rows, None], inside[rows, None].float())
        gradient[rows] = d @ part
    return scalars, reduced(gradient)


def measure(repeat: int) -> list[dict[str, Any]]:
    global SENT
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(0)
    head = torch.randn(VOCABULARY, WIDTH, generator=g) * 0.05
    hidden = torch.randn(ROWS, WIDTH, generator=g)
    target = torch.randint(VOCABULARY, (ROWS,), generator=g)
    part = head.chunk(2)[dist.get_rank()].clone()
    found: list[dict[str, Any]] = []
    ways = {"rows": (by_rows, head), "vocabulary": (by_vocabulary, part)}
    for entropy in (False, True):
        results, runs = [], dict[str, dict[str, Any]]()
        for name, (way, own) in ways.items():
            SENT = 0
            results.append(way(hidden, own, target, entropy))
            memory = {"exchanged": SENT, "head": own.numel() * 4}
            memory["peak"] = peak(partial(way, hidden, own, target, entropy))
            runs[name] = {"way": name, "entropy": entropy, "every": []} | memory
        apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))
        assert apart < 1e-4, f"the two ways differ by {apart}"
        for _ in range(repeat):
            for name, (way, own) in ways.items():
                dist.barrier()
                start = time.perf_counter(), time.process_time()
                way(hidden, own, target, entropy)
                spent = torch.tensor([time.perf_counter() - start[0], time.process_time() - start[1]])
                dist.all_reduce(spent, dist.ReduceOp.MAX)
                runs[name]["every"].append(spent.tolist())
        for run in runs.values():
            run["seconds"], run["processor"] = (min(times) for times in zip(*run["every"], strict=True))
            found.append(run | {"apart": apart})
    dist.destroy_process_group()
    return found


def table(found: list[dict[str, Any]]) -> str:
    lines = ["| way | computed | seconds | processor | exchanged | peak | head held |", "|---|---|---|---|---|---|---|"]
    for one in found:
        what = "log-probs and entropy" if one["entropy"] else "log-probs"
        sizes = " | ".join(f"{one[key] / 1e6:.1f} MB" for key in ("exchanged", "peak", "head"))
        lines.append(f"| {one['way']} | {what} | {one['seconds']:.2f} | {one['processor']:.2f} | {sizes} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "vocabulary_tensor.json")
    parser.add_argument("--show", action="store_true", help="print what is recorded, and measure nothing")
    given = parser.parse_args()
    if given.worker:
        found = measure(given.repeat)
        if os.environ["RANK"] == "0":
            print(json.dumps(found))
        return
    if not given.show:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [*torchrun, __file__, "--worker", "--repeat", str(given.repeat)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
        found = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("[")))
        record = {"runs": found, "cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}
        given.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(json.loads(given.out.read_text())["runs"]))


if __name__ == "__main__":
    main()
