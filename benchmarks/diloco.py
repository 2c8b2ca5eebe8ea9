"""The cost of a round and the result of training: bytes and seconds by wire, loss at equal tokens, goodput under kills.

    python benchmarks/diloco.py                 all three parts; prints tables, writes benchmarks/results/diloco.json
    python benchmarks/diloco.py --only loss     one part; the others' results stay
    python benchmarks/diloco.py --table         the tables of the stored results

wire      two processes on this machine: an all-reduce of fp32 by gloo over loopback, and rounds of the protocol through
          a real S3 server (SeaweedFS) by each wire. Both sides start a repetition together, equally often; the slower
          one of the two counts, and the median over repetitions.
loss      four replicas on nano, each with demonstrations of its own, against data-parallel with the same batches at the
          same number of tokens: one all-reduce of fp32 gradients per update. "Fewer bytes" compares what a replica
          sends: its deltas against a gradient of 4 bytes per parameter and update (a ring of N sends 2 (N - 1) / N of
          that). The next column is what it receives: all that it reads from the store, with the deltas of every
          member. That grows with N; a ring's does not.
goodput   four real processes; every N seconds one gets SIGKILL and is started again. Goodput is the time of the
          undisturbed run (about 40 s) over the time needed. One repetition.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from earnest.diloco.globals import Globals, OuterSGD
from earnest.diloco.ledger import Ledger
from earnest.diloco.manager import BucketManager
from earnest.diloco.protocol import Rules
from earnest.diloco.wire import KINDS, Wire
from earnest.store import Bucket

RESULTS = Path("benchmarks/results/diloco.json")
DATA_PARALLEL = "data-parallel, fp32"
ARMS: dict[str, tuple[int, Wire]] = {
    "fp32, H = 10": (10, Wire("fp32")),
    "bf16, H = 10": (10, Wire("bf16")),
    "int8, H = 10": (10, Wire("int8")),
    "int4, H = 10": (10, Wire("int4")),
    "pulse, H = 10": (10, Wire("pulse")),
    "topk 1/16, H = 10": (10, Wire("topk", 1 / 16)),
    "topk 1/64, H = 10": (10, Wire("topk", 1 / 64)),
    "int4, H = 20": (20, Wire("int4")),
}


# --- wire -------------------------------------------------------------------------------------------------------------


def _gloo(rank: int, start: Any, port: int, n: int, repeats: int, found: Any) -> None:
    """One side of an all-reduce; ``found`` gets the seconds of each repetition."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    v = torch.randn(n, generator=torch.Generator().manual_seed(rank))
    times = []
    for _ in range(repeats + (repeats > 1)):  # the first one makes connections and buffers; a single one is as it is
        start.wait()
        began = time.perf_counter()
        dist.all_reduce(v)
        times.append(time.perf_counter() - began)
    found.put((times[-repeats:], 4 * n))
    dist.destroy_process_group()


def _bucket(rank: int, start: Any, url: str, environment: dict[str, str], n: int, kind: Any, repeats: int, found: Any):
    """One replica's side of rounds through the store, by the Manager that torchft is given: encode, upload, ``meet``,
    decode, average, the fingerprints that the protocol asks for, and the outer step on the agreed copy."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    chance = torch.Generator().manual_seed(0)
    agreed = Globals([[0.02 * torch.randn(n, generator=chance)]], OuterSGD(0.7, 0.0, False))
    ledger = Ledger(Bucket.open(url, writer=str(rank)))
    if rank == 0:
        ledger.put_state(0, b"", agreed.fingerprint())
    manager = BucketManager(ledger, Rules(2, 2), rank, agreed, Wire(kind), tokens=1)
    chance.manual_seed(1 + rank)
    times = []
    for _ in range(repeats + (repeats > 1)):
        delta = 3e-6 * torch.randn(n, generator=chance)
        manager.start_quorum()
        start.wait()
        began = time.perf_counter()
        manager.allreduce(delta).wait()
        manager.should_commit()
        times.append(time.perf_counter() - began)
    found.put((times[-repeats:], int(manager.last["bytes_delta"])))


def two(target: Any, *words: Any) -> tuple[float, int]:
    """(seconds, bytes) of two processes that start each repetition together: the slower one's; the median of all."""
    from tests.diloco.processes import context

    ctx = context()
    start, found = ctx.Barrier(2), ctx.Queue()
    both = [ctx.Process(target=target, args=(rank, start, *words, found), daemon=True) for rank in range(2)]
    for one in both:
        one.start()
    sides = []
    while len(sides) < 2:
        try:
            sides.append(found.get(timeout=5))
        except queue.Empty:
            if any(one.exitcode for one in both):
                raise SystemExit(f"a process of {target.__name__} ended with {[o.exitcode for o in both]}") from None
    for one in both:
        one.join()
    return statistics.median(map(max, *(times for times, _ in sides))), sides[0][1]


def measure_wire(sizes: Sequence[int], repeats: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Weights of spread 0.02; differences as ten steps at lr 1e-6 make them, as in RL of all weights."""
    from tests.diloco.servers import BUCKET, Seaweed, free_ports

    with tempfile.TemporaryDirectory() as place:
        server = Seaweed(Path(place), volume_mb=4096).start()
        try:
            for n, times in zip(sizes, repeats, strict=True):
                seconds, size = two(_gloo, free_ports(1)[0], n, times)
                yield {"n": n, "way": "all-reduce, fp32", "bytes": size, "seconds": seconds, "repeats": times}
                for kind in KINDS:
                    url = f"s3://{BUCKET}/bench/{n}/{kind}"
                    seconds, size = two(_bucket, url, server.environment, n, kind, times)
                    yield {"n": n, "way": kind, "bytes": size, "seconds": seconds, "repeats": times}
        finally:
            server.stop()


# --- loss -------------------------------------------------------------------------------------------------------------


def one_arm(job: tuple[str, int, argparse.Namespace]) -> dict[str, Any]:
    """In a process of its own, with one thread of torch; the training is that of experiments/evidence/replicas.py."""
    from experiments.evidence.replicas import Arm, Size, train

    name, seed, args = job
    torch.set_num_threads(1)
    every, wire = ARMS.get(name, (10, None))
    size = Size("nano", {"name": "sort"}, args.lr, args.steps, every, args.replicas, args.rows)
    found = train(size, Arm(name, wire, OuterSGD(args.outer_lr, args.outer_momentum)), seed)
    known = {"arm": name, "seed": seed, "curve": found["curve"], "bytes": found["sent"]}
    return known | ({"parameters": found["parameters"]} if wire is None else {"received": found["received"]})


# --- goodput ----------------------------------------------------------------------------------------------------------


def goodput(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of the same run, undisturbed and with a SIGKILL every so many seconds."""
    from tests.diloco.processes import ReplicaProcesses, context, put_run
    from tests.runs.tiny import tiny_folder

    rows = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = tiny_folder(place / "tiny")
        ctx = context()
        first = ctx.Process(target=print)  # the fork server imports torch once, before anything is timed
        first.start()
        first.join()
        words = ["replicas=4", f"steps={args.goodput_steps}", "sync.every=5", "checkpoint.every=1", "sync.grace=3600"]
        for every in (None, 10.0, 5.0):
            where = place / f"every-{every}"
            where.mkdir()
            url = f"file://{where}/bucket"
            put_run(url, where, model, *words)
            processes = ReplicaProcesses(ctx, url, where, {}, lambda replica, life: {})
            chance, next_kill = random.Random(0), [time.monotonic() + (every or 1e9)]

            def between(
                processes: ReplicaProcesses = processes,
                chance: random.Random = chance,
                when: list[float] = next_kill,
                every: float = every or 1e9,
            ) -> None:
                if time.monotonic() >= when[0] and processes.running:
                    processes.running[chance.choice(sorted(processes.running))][0].kill()
                    when[0] = time.monotonic() + every

            began = time.monotonic()
            processes.run({f"replica-{i}": i for i in range(4)}, between, seconds=1200)
            rows.append({"every": every, "kills": processes.kills, "seconds": time.monotonic() - began, "repeats": 1})
    return rows


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(data: dict[str, Any]) -> str:
    lines: list[str] = []
    if wire := data.get("wire"):
        lines += [
            "| parameters | method | MB sent per replica | times fewer than fp32 | seconds per round | repetitions |",
            "|---|---|---|---|---|---|",
        ]
        for row in wire:
            factor = 4 * row["n"] / row["bytes"]
            size, seconds = f"{row['bytes'] / 1e6:.3f}", f"{row['seconds']:.2f} | {row.get('repeats', '–')}"
            lines.append(f"| {row['n'] / 1e6:g} M | {row['way']} | {size} | {factor:.1f} | {seconds} |")
        lines.append("")
    if loss := data.get("loss"):
        lines += [
            "| arm | held-out loss at update 20 | at 40 | at the end | ± over seeds | minus data-parallel | ± | "
            "kB sent per replica | kB received | times fewer bytes sent |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        base = statistics.mean(r["bytes"] for r in loss if r["arm"].startswith("data"))
        begun = [r["curve"][0][1] for r in loss if r["arm"].startswith("data")]
        lines.append(f"| before | – | – | {statistics.mean(begun):.4f} | {_spread(begun)} | – | – | – | – | – |")
        beside = {r["seed"]: r["curve"][-1][1] for r in loss if r["arm"].startswith("data")}
        for arm in dict.fromkeys(r["arm"] for r in loss):
            runs = [r for r in loss if r["arm"] == arm]
            curves = [dict(map(tuple, r["curve"])) for r in runs]
            at = " | ".join(f"{statistics.mean(c[k] for c in curves):.4f}" if k in curves[0] else "–" for k in (20, 40))
            ends = [r["curve"][-1][1] for r in runs]
            apart = [r["curve"][-1][1] - beside[r["seed"]] for r in runs]
            size = statistics.mean(r["bytes"] for r in runs)
            pairs = f"{statistics.mean(apart):+.4f} | {_spread(apart)}" if not arm.startswith("data") else "– | –"
            got = [r["received"] for r in runs if "received" in r]  # not in results of an all-reduce, or older ones
            came = f"{statistics.mean(got) / 1e3:.1f}" if got else "–"
            worth = f"{statistics.mean(ends):.4f} | {_spread(ends)} | {pairs} | {size / 1e3:.1f} | {came}"
            lines.append(f"| {arm} | {at} | {worth} | {base / size:.0f} |")
        lines.append("")
    if good := data.get("goodput"):
        lines += ["| a kill every | kills | seconds | goodput | repetitions |", "|---|---|---|---|---|"]
        calm = good[0]["seconds"]
        for row in good:
            every = "never" if row["every"] is None else f"{row['every']:g} s"
            worth = f"{100 * calm / row['seconds']:.0f} % | {row.get('repeats', 1)}"
            lines.append(f"| {every} | {row['kills']} | {row['seconds']:.0f} | {worth} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.stdev(values):.4f}" if len(set(values)) > 1 else "–"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("wire", "loss", "goodput"))
    parser.add_argument("--table", action="store_true", help="print the stored results")
    parser.add_argument("--sizes", type=float, nargs="*", default=[1e6, 1e7, 1e8])
    parser.add_argument("--repeats", type=int, nargs="*", default=[5, 3, 1], help="of a round, for each size")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=2, help="demonstrations per replica and update")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.6)
    parser.add_argument("--goodput-steps", type=int, default=320)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    data: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
    if args.table:
        print(tables(data))
        return 0
    torch.set_num_threads(1)

    begun = time.monotonic()

    def log(text: str) -> None:
        print(f"{time.monotonic() - begun:5.0f} s  {text}", file=sys.stderr, flush=True)

    def keep() -> None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(data, indent=1))

    if args.only in (None, "loss"):
        data["loss"] = []
        jobs = [(arm, seed, args) for seed in range(args.seeds) for arm in (DATA_PARALLEL, *ARMS)]
        with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:  # losses know no clock
            for found in pool.map(one_arm, jobs):
                data["loss"].append(found)
                log(f"seed {found['seed']}: {found['arm']}: {found['curve'][-1][1]:.4f}")
                keep()
    if args.only in (None, "wire"):
        data["wire"] = []
        for row in measure_wire([int(n) for n in args.sizes], args.repeats):
            data["wire"].append(row)
            log(f"{row['n']:,} {row['way']}: {row['seconds']:.2f} s")
            keep()
    if args.only in (None, "goodput"):
        data["goodput"] = goodput(args)
        log("goodput")
        keep()
    print(tables(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
