"""Sixteen processes on one level and in four groups, against the simulation's prediction.

    python -m experiments.evidence.layout             both layouts; JSON, table and figure
    python -m experiments.evidence.layout --table

Each process is one replica of the real protocol over a bucket (a folder). Its training is a wait: lognormal, with the
simulation's spread. All requests to the store are counted, by process and key. The simulation gets the same waits,
rules and sizes, and the store's latencies as they were measured here; `benchmarks/diloco_scale.py` has it.
"""

from __future__ import annotations

import functools
import json
import math
import multiprocessing
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from experiments.evidence.jobs import Jobs, Record, main, plots, table

REPLICAS, NUMBERS, ROUNDS, TRAIN, SPREAD, GRACE = 16, 50_000, 6, 6.0, 0.1, 60.0
GROUPS = {"flat": 1, "groups": 4}
WARM = 1
"""The first rounds, whose processes start at different times, are not counted."""


def replica(url: str, number: int, groups: int, report: str) -> None:
    """One process: ``ROUNDS`` rounds; writes its requests and times."""
    import torch

    from earnest.diloco.globals import Globals, OuterSGD
    from earnest.diloco.ledger import Ledger
    from earnest.diloco.manager import BucketManager
    from earnest.diloco.protocol import Rules
    from earnest.diloco.wire import Wire
    from earnest.store import Bucket, KeyList, Store, open_store

    torch.set_num_threads(1)
    seen: list[tuple[str, str, float]] = []

    class Counted:
        """Every request with its seconds."""

        def __init__(self, store: Store) -> None:
            self.store = store

        def create(self, key: str, data: bytes) -> None:
            began = time.perf_counter()
            try:
                self.store.create(key, data)
            finally:
                seen.append(("create", key, time.perf_counter() - began))

        def get(self, key: str) -> bytes | None:
            began = time.perf_counter()
            found = self.store.get(key)
            seen.append(("get", key, time.perf_counter() - began))
            return found

        def list(self, prefix: str) -> KeyList:
            began = time.perf_counter()
            found = self.store.list(prefix)
            seen.append(("list", prefix, time.perf_counter() - began))
            return found

        def delete(self, keys: KeyList) -> None:
            self.store.delete(keys)

    chance, waits = torch.Generator().manual_seed(number), random.Random(number)
    agreed = Globals([[torch.zeros(NUMBERS)]], OuterSGD(1.0, 0.0))
    ledger = Ledger(Bucket(Counted(open_store(url)), url, str(number)))
    ledger.put_state(0, b"", agreed.fingerprint())
    rules = Rules(REPLICAS, REPLICAS, GRACE)
    manager = BucketManager(ledger, rules, number, agreed, Wire("fp32"), tokens=1, groups=groups)
    rounds = []
    for _ in range(ROUNDS):
        manager.announce()
        delta = torch.randn(NUMBERS, generator=chance)
        manager.start_quorum()
        time.sleep(TRAIN * math.exp(SPREAD * waits.gauss(0, 1)))
        first, arrived = len(seen), time.time()
        manager.allreduce(delta).wait()
        manager.should_commit()
        rounds.append(
            {"arrived": arrived, "done": time.time(), "requests": seen[first:], "bytes": manager.last["bytes_received"]}
        )
    Path(report).write_text(json.dumps({"rounds": rounds, "end": agreed.fingerprint()}))


def measure(layout: str) -> Record:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "earnest.diloco.manager"])
    with tempfile.TemporaryDirectory() as place:
        paths = [f"{place}/{i}.json" for i in range(REPLICAS)]
        url = f"file://{place}/bucket"
        all_ = [
            context.Process(target=replica, args=(url, i, GROUPS[layout], paths[i]), daemon=True)
            for i in range(REPLICAS)
        ]
        for one in all_:
            one.start()
        for one in all_:
            one.join()
        found = [json.loads(Path(path).read_text()) for path in paths]
    rounds = []
    for k in range(WARM, ROUNDS):
        own = [f["rounds"][k] for f in found]
        last = max(r["arrived"] for r in own)
        requests = [tuple(x) for r in own for x in r["requests"]]
        gets = Counter(key for kind, key, _ in requests if kind == "get")
        rounds.append(
            {
                "delta_reads": sum(n for key, n in gets.items() if "/delta/" in key),
                "commit_reads": sum(n for key, n in gets.items() if key.endswith("commit")),
                "lists": sum(kind == "list" for kind, _, _ in requests),
                "hottest": max(gets.values()),
                "megabytes": statistics.mean(r["bytes"] for r in own) / 1e6,
                "exchange": statistics.median(r["done"] - last for r in own),
                "arrived": [r["arrived"] - last for r in own],
            }
        )
    times = {
        kind: statistics.mean(t for f in found for r in f["rounds"] for what, _, t in r["requests"] if what == kind)
        for kind in ("create", "get", "list")
    }
    return {
        "layout": layout,
        "rounds": rounds,
        "latency": times,
        "equal": len({f["end"] for f in found}) == 1,
        "predicted": predict(layout, times),
    }


def predict(layout: str, times: dict[str, float]) -> Record:
    """The simulation with these waits and latencies."""
    from benchmarks.diloco_scale import Fleet, Shop, simulate
    from earnest.diloco.protocol import Rules

    shop = Shop(write_seconds=times["create"], read_seconds=times["get"], list_seconds=times["list"])
    rules = Rules(REPLICAS, REPLICAS, GRACE)
    fleet = Fleet(REPLICAS, delta=4 * NUMBERS, train_seconds=TRAIN, train_spread=SPREAD, rules=rules)
    found = simulate(fleet, layout, shop)
    deltas = REPLICAS * (REPLICAS if layout == "flat" else 8)
    return {
        "delta_reads": deltas,
        "commit_reads": found.reads - deltas,
        "lists": found.lists,
        "hottest": found.hottest,
        "megabytes": 1e3 * found.gigabytes,
        "exchange": found.meet_seconds,
    }


def jobs(out: Path) -> Jobs:
    del out
    return {layout: functools.partial(measure, layout) for layout in GROUPS}


SHOWN = {
    "delta_reads": ("reads of deltas per round", 0),
    "commit_reads": ("reads of commits per round", 0),
    "lists": ("lists per round", 0),
    "hottest": ("reads of the busiest key", 0),
    "megabytes": ("MB read by each replica", 2),
    "exchange": ("exchange, seconds", 2),
}


def tables(records: Sequence[Record]) -> list[str]:
    rows = []
    for r in records:
        for key, (name, digits) in SHOWN.items():
            values = [one[key] for one in r["rounds"]]
            low, high = min(values), max(values)
            rows.append(
                [r["layout"], name, f"{r['predicted'][key]:.{digits}f}", f"{statistics.mean(values):.{digits}f}",
                 f"{low:.{digits}f} … {high:.{digits}f}"]
            )  # fmt: skip
    return [table(["16 processes", "number", "predicted", "measured, mean of the rounds", "least … most"], rows)]


def figure(records: Sequence[Record], path: Path) -> None:
    made, axes = plots(2)
    for axis, key in zip(axes, ("delta_reads", "exchange"), strict=True):
        names = [r["layout"] for r in records]
        places = range(len(names))
        axis.bar([p - 0.2 for p in places], [r["predicted"][key] for r in records], 0.38, label="predicted")
        measured = [statistics.mean(one[key] for one in r["rounds"]) for r in records]
        axis.bar([p + 0.2 for p in places], measured, 0.38, label="measured")
        axis.set_xticks(list(places), names)
        axis.set(ylabel=SHOWN[key][0])
        axis.legend()
    made.savefig(path)


if __name__ == "__main__":
    main("layout", jobs, tables, figure)
