"""What a meeting costs and what it is worth: bytes and seconds by wire, loss at equal tokens, goodput under kills.

    python benchmarks/diloco.py                 all three parts; prints tables, writes benchmarks/results/diloco.json
    python benchmarks/diloco.py --only loss     one part; the others' results stay
    python benchmarks/diloco.py --table         the tables of the stored results

wire      two processes on this machine: an all-reduce of fp32 by gloo over loopback, and a round through a real S3
          server (SeaweedFS) by each wire: encode, upload, read back, read the other's, decode, average.
loss      four replicas on nano, each with demonstrations of its own, against data-parallel with the same batches at the
          same number of tokens: one all-reduce of fp32 gradients an update. Bytes are what a replica sends.
goodput   four real processes; every so many seconds one gets SIGKILL and is started again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from earnest.diloco.globals import OuterSGD
from earnest.diloco.ledger import Ledger
from earnest.diloco.outer import ReplicaOuter, Schedule
from earnest.diloco.protocol import Rules, average
from earnest.diloco.store import Bucket
from earnest.diloco.wire import KINDS, Wire, decode

RESULTS = Path("benchmarks/results/diloco.json")
ARMS: dict[str, tuple[int, str, float | None]] = {
    "fp32, H = 10": (10, "fp32", None),
    "int8, H = 10": (10, "int8", None),
    "int4, H = 10": (10, "int4", None),
    "pulse, H = 10": (10, "pulse", None),
    "topk 1/16, H = 10": (10, "topk", 1 / 16),
    "int4, H = 20": (20, "int4", None),
}


# --- wire -------------------------------------------------------------------------------------------------------------


def _gloo(rank: int, port: int, sizes: Sequence[int], out: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found = {}
    for n in sizes:
        v = torch.randn(n, generator=torch.Generator().manual_seed(rank))
        dist.all_reduce(v)  # connections and buffers
        times = []
        for _ in range(3):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(v)
            times.append(time.perf_counter() - began)
        found[n] = min(times)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def gloo(sizes: Sequence[int]) -> dict[int, float]:
    """Seconds of an all-reduce of n fp32 numbers between two processes, the best of three."""
    import multiprocessing
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ctx = multiprocessing.get_context("fork")  # before any thread is started here
    with tempfile.TemporaryDirectory() as place:
        both = [ctx.Process(target=_gloo, args=(rank, port, sizes, f"{place}/t")) for rank in range(2)]
        for one in both:
            one.start()
        for one in both:
            one.join()
        return {int(n): t for n, t in json.loads(Path(f"{place}/t").read_text()).items()}


def one_round(bucket: Bucket, key: str, wire: Wire, delta: torch.Tensor, start: torch.Tensor) -> tuple[int, float]:
    """(bytes sent, seconds) of one replica's part: the other's delta is as large as one's own."""
    began = time.perf_counter()
    payload = wire.encode(delta, start)
    bucket.create(key, "delta", payload)
    read = []
    for _ in range(2):
        found = bucket.get(key)
        assert found is not None
        read.append(decode(found.payload, delta.numel()))
    average(read, [1, 1])
    return len(payload), time.perf_counter() - began


def measure_wire(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Weights of spread 0.02; differences as ten steps at lr 1e-6 make them, as in RL of all weights."""
    from tests.diloco.servers import BUCKET, Seaweed

    reduced = gloo(sizes)
    with tempfile.TemporaryDirectory() as place:
        server = Seaweed(Path(place)).start()
        os.environ.update(server.environment)
        try:
            bucket = Bucket.open(f"s3://{BUCKET}/bench")
            for n in sizes:
                yield {"n": n, "way": "all-reduce, fp32", "bytes": 4 * n, "seconds": reduced[n]}
                chance = torch.Generator().manual_seed(0)
                start = 0.02 * torch.randn(n, generator=chance)
                delta = 3e-6 * torch.randn(n, generator=chance)
                for kind in KINDS:
                    key = f"{n}/{kind}"
                    size, seconds = one_round(bucket, key, Wire(kind), delta, start)
                    bucket.delete([key])
                    yield {"n": n, "way": kind, "bytes": size, "seconds": seconds}
        finally:
            server.stop()


# --- loss -------------------------------------------------------------------------------------------------------------


class Learner:
    """nano with a LoRA, and demonstrations of one replica's own."""

    def __init__(self, seed: int, replica: int, lr: float) -> None:
        import earnest as en
        from earnest.runs.seeds import derive
        from earnest.tasks import PromptStream, get_task

        self.policy = en.load("nano")
        adapter = en.attach(self.policy, en.LoRA(rank=8), targets="all-linear", seed=seed)
        self.engine = en.LocalEngine(self.policy, adapter, en.AdamW(lr=lr))
        self.task = get_task("sort")
        self.stream = PromptStream(self.task, derive(seed, "demonstrations", replica) % 2**31)

    def batch(self, count: int, prompts: Sequence[Any] | None = None) -> Any:
        from earnest.runs.collect import demonstrate
        from earnest.signals import Batch

        chosen = self.stream.next(count) if prompts is None else prompts
        rows = [demonstrate(self.policy, self.task, p) for p in chosen]
        return Batch.from_rows(
            [tuple(p) for p, _ in rows],
            [tuple(a) for _, a in rows],
            role=["demonstration"] * len(rows),
            group=list(range(len(rows))),
            pair=[-1] * len(rows),
            policy_version=[0] * len(rows),
            pad=self.policy.pad_id,
        )

    def loss(self, held_out: Any) -> float:
        from earnest.engines.base import LogProbsWanted

        return -float(self.engine.score(held_out, LogProbsWanted()).mean())  # type: ignore[union-attr]


def held_out(learner: Learner, count: int = 64) -> Any:
    return learner.batch(count, learner.task.prompts("heldout", count, 7))


def data_parallel(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    import earnest as en
    from earnest.signals import Batch

    learners = [Learner(seed, i, args.lr) for i in range(args.replicas)]
    one, test = learners[0], held_out(learners[0])
    curve = [(0, one.loss(test))]
    n = sum(p.numel() for p in one.engine.parameters)
    for step in range(1, args.steps + 1):
        prompts = [p for learner in learners for p in learner.stream.next(args.rows)]
        whole: Batch = one.batch(0, prompts)
        one.engine.step(whole, en.SFT())
        if step % 10 == 0:
            curve.append((step, one.loss(test)))
    return {"arm": "data-parallel, fp32", "seed": seed, "curve": curve, "bytes": 4 * n * args.steps, "parameters": n}


def replicas(arm: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    import earnest as en

    every, kind, density = ARMS[arm]
    sent: dict[int, int] = {}
    curve: list[tuple[int, float]] = []
    with tempfile.TemporaryDirectory() as place:
        learners = [Learner(seed, i, args.lr) for i in range(args.replicas)]
        test = held_out(learners[0])
        curve.append((0, learners[0].loss(test)))
        errors: list[BaseException] = []

        def life(i: int) -> None:
            try:
                engine = learners[i].engine
                outer = ReplicaOuter(
                    engine,
                    Ledger(Bucket.open(f"file://{place}/bucket")),
                    i,
                    Rules(args.replicas, args.replicas, poll=0.01),
                    Schedule(every, outer=OuterSGD(args.outer_lr, args.outer_momentum, True)),
                    Wire(kind, density),  # type: ignore[arg-type]
                    rounds=args.steps // every,
                    snapshot_every=1000,
                )
                outer.join(engine)
                engine.outer = outer
                while not outer.over:
                    engine.step(learners[i].batch(args.rows), en.SFT())
                    if outer.between:
                        sent[i] = sent.get(i, 0) + int(outer.manager.last["bytes_delta"])
                        if i == 0:
                            curve.append((outer.updates, learners[0].loss(test)))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=life, args=(i,)) for i in range(args.replicas)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
    return {"arm": arm, "seed": seed, "curve": curve, "bytes": sent[0]}


# --- goodput ----------------------------------------------------------------------------------------------------------


def goodput(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of the same run, undisturbed and with a SIGKILL every so many seconds."""
    from tests.diloco.processes import Troupe, context, put_run
    from tests.runs.tiny import tiny_folder

    rows = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        model = tiny_folder(place / "tiny")
        ctx = context()
        words = ["replicas=4", f"steps={args.goodput_steps}", "sync.every=5", "checkpoint.every=1", "sync.grace=3600"]
        for every in (math.inf, 10.0, 5.0):
            where = place / f"every-{every}"
            where.mkdir()
            url = f"file://{where}/bucket"
            put_run(url, where, model, *words)
            troupe = Troupe(ctx, url, where, {}, lambda replica, life: {})
            chance, next_kill = random.Random(0), [time.monotonic() + every]

            def between(
                troupe: Troupe = troupe,
                chance: random.Random = chance,
                when: list[float] = next_kill,
                every: float = every,
            ) -> None:
                if time.monotonic() >= when[0] and troupe.running:
                    troupe.running[chance.choice(sorted(troupe.running))][0].kill()
                    when[0] = time.monotonic() + every

            began = time.monotonic()
            troupe.run({f"replica-{i}": i for i in range(4)}, between, seconds=1200)
            rows.append({"every": every, "kills": troupe.kills, "seconds": time.monotonic() - began})
    return rows


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(data: dict[str, Any]) -> str:
    lines: list[str] = []
    if wire := data.get("wire"):
        lines += ["| parameters | way | MB a replica sends | fewer than fp32 | seconds |", "|---|---|---|---|---|"]
        for row in wire:
            factor = 4 * row["n"] / row["bytes"]
            size = f"{row['bytes'] / 1e6:.3f}"
            lines.append(f"| {row['n'] / 1e6:g} M | {row['way']} | {size} | {factor:.1f} | {row['seconds']:.2f} |")
        lines.append("")
    if loss := data.get("loss"):
        lines += [
            "| arm | held-out loss at update 20 | at the end | ± over seeds | kB a replica sends | fewer bytes |",
            "|---|---|---|---|---|---|",
        ]
        base = statistics.mean(r["bytes"] for r in loss if r["arm"].startswith("data"))
        begun = [r["curve"][0][1] for r in loss]
        lines.append(f"| before | – | {statistics.mean(begun):.4f} | {_spread(begun)} | – | – |")
        for arm in dict.fromkeys(r["arm"] for r in loss):
            runs = [r for r in loss if r["arm"] == arm]
            middle = statistics.mean(dict(map(tuple, r["curve"]))[20] for r in runs)
            ends = [r["curve"][-1][1] for r in runs]
            size = statistics.mean(r["bytes"] for r in runs)
            worth = f"{statistics.mean(ends):.4f} | {_spread(ends)} | {size / 1e3:.1f} | {base / size:.0f}"
            lines.append(f"| {arm} | {middle:.4f} | {worth} |")
        lines.append("")
    if good := data.get("goodput"):
        lines += ["| a kill every | kills | seconds | goodput |", "|---|---|---|---|"]
        calm = good[0]["seconds"]
        for row in good:
            every = "never" if row["every"] == math.inf else f"{row['every']:g} s"
            lines.append(f"| {every} | {row['kills']} | {row['seconds']:.0f} | {100 * calm / row['seconds']:.0f} % |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.stdev(values):.4f}" if len(set(values)) > 1 else "–"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("wire", "loss", "goodput"))
    parser.add_argument("--table", action="store_true", help="print the stored results")
    parser.add_argument("--sizes", type=float, nargs="*", default=[1e6, 1e7, 1e8])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=2, help="demonstrations a replica and update")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--outer-momentum", type=float, default=0.6)
    parser.add_argument("--goodput-steps", type=int, default=100)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    data: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
    if args.table:
        print(tables(data))
        return 0
    torch.set_num_threads(1)

    def keep() -> None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(data, indent=1))

    if args.only in (None, "loss"):
        data["loss"] = []
        for seed in range(args.seeds):
            data["loss"].append(data_parallel(seed, args))
            for arm in ARMS:
                began = time.monotonic()
                data["loss"].append(replicas(arm, seed, args))
                end = data["loss"][-1]["curve"][-1][1]
                print(f"seed {seed}: {arm}: {end:.4f} in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
                keep()
    if args.only in (None, "wire"):
        data["wire"] = []
        for row in measure_wire([int(n) for n in args.sizes]):
            data["wire"].append(row)
            keep()
    if args.only in (None, "goodput"):
        data["goodput"] = goodput(args)
        keep()
    print(tables(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())
