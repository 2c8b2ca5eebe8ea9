"""Bytes against loss: SparseLoCo beside int4, topk and data-parallel, four replicas on demonstrations.

    python -m experiments.evidence.replicas                     nano and SmolLM2, three seeds each
    python -m experiments.evidence.replicas --only nano
    python -m experiments.evidence.replicas --table

The replicas exchange differences through a bucket (a folder), as in a run, in threads of one process. Data-parallel
training sees the same rows in the same number of updates, and sends a gradient of 4 bytes per parameter in each.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import earnest as en
from earnest.diloco.globals import OuterSGD
from earnest.diloco.ledger import Ledger
from earnest.diloco.outer import ReplicaOuter, SyncSchedule
from earnest.diloco.protocol import Rules
from earnest.diloco.wire import Wire
from earnest.engines import LogProbsWanted
from earnest.rollouts import demonstrate
from earnest.seeds import derive
from earnest.signals import Batch
from earnest.store import Bucket
from earnest.tasks import Prompt, PromptStream, get_task
from experiments.evidence.jobs import Jobs, Record, by, main, plots, spread, table

MEAN, MOMENTUM = OuterSGD(1.0, 0.0), OuterSGD(0.7, 0.6)


@dataclass(frozen=True)
class Arm:
    """A wire and an outer step; no wire: data-parallel."""

    name: str
    wire: Wire | None = None
    outer: OuterSGD = MEAN


ARMS = (
    Arm("data-parallel, fp32"),
    Arm("int4", Wire("int4")),
    Arm("int4, momentum", Wire("int4"), MOMENTUM),
    Arm("topk 1/16", Wire("topk", 1 / 16)),
    Arm("topk 1/16, momentum", Wire("topk", 1 / 16), MOMENTUM),
    Arm("sparseloco 1/16", Wire("sparseloco", 1 / 16)),
    Arm("sparseloco 1/16, momentum", Wire("sparseloco", 1 / 16), MOMENTUM),
    Arm("sparseloco 1/16, feedback 1", Wire("sparseloco", 1 / 16, 1.0)),
    Arm("sparseloco 1/16, feedback 0", Wire("sparseloco", 1 / 16, 0.0)),
    Arm("topk 1/64", Wire("topk", 1 / 64)),
    Arm("sparseloco 1/64", Wire("sparseloco", 1 / 64)),
)
SMALL = ("data-parallel, fp32", "int4", "topk 1/16", "sparseloco 1/16")
"""The arms on SmolLM2."""


@dataclass(frozen=True)
class Size:
    """A model, its task and the length of the training; ``every`` updates make a round."""

    model: str
    task: dict[str, Any]
    lr: float
    updates: int
    every: int = 10
    replicas: int = 4
    rows: int = 2
    targets: str | tuple[str, ...] = "all-linear"
    seeds: Sequence[int] = (0, 1, 2)
    arms: Sequence[str] = field(default_factory=lambda: [arm.name for arm in ARMS])


NANO = Size("nano", {"name": "sort"}, 5e-4, 120)
SUMS = {"name": "reasoning_gym/chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
SMOLLM2 = Size("smollm2", SUMS, 3e-4, 60, targets=("q_proj", "v_proj"), arms=SMALL)


class Learner:
    """A model with a LoRA, and demonstrations of one replica's own."""

    def __init__(self, size: Size, seed: int, replica: int) -> None:
        settings = dict(size.task)
        self.policy = en.load(size.model)
        adapter = en.attach(self.policy, en.LoRA(rank=8), targets=size.targets, seed=seed)
        self.engine = en.LocalEngine(self.policy, adapter, en.AdamW(lr=size.lr))
        self.task = get_task(settings.pop("name"), settings)
        self.stream = PromptStream(self.task, derive(seed, "demonstrations", replica) % 2**31)

    def batch(self, prompts: Sequence[Prompt]) -> Batch:
        rows = [demonstrate(self.policy, self.task, p) for p in prompts]
        n = len(rows)
        return Batch.from_rows(
            [tuple(p) for p, _ in rows], [tuple(a) for _, a in rows], role=["demonstration"] * n, group=list(range(n)),
            pair=[-1] * n, policy_version=[0] * n, pad=self.policy.pad_id,
        )  # fmt: skip

    def test(self) -> Batch:
        return self.batch(self.task.prompts("heldout", 64, 7))

    def loss(self, held_out: Batch) -> float:
        logprobs = self.engine.score(held_out, LogProbsWanted())
        assert isinstance(logprobs, torch.Tensor)
        return -float(logprobs.mean())


def train(size: Size, arm: Arm, seed: int) -> Record:
    """The held-out loss after every round, and the bytes that replica 0 sent and received."""
    learners = [Learner(size, seed, i) for i in range(size.replicas)]
    first, test = learners[0], learners[0].test()
    curve = [(0, first.loss(test))]
    n = sum(p.numel() for p in first.engine.parameters)
    known: Record = {"model": size.model, "arm": arm.name, "seed": seed, "parameters": n, "updates": size.updates}
    if arm.wire is None:
        for update in range(1, size.updates + 1):
            first.engine.step(first.batch([p for one in learners for p in one.stream.next(size.rows)]), en.SFT())
            if update % size.every == 0:
                curve.append((update, first.loss(test)))
        return known | {"curve": curve, "sent": 4 * n * size.updates, "received": None}
    sent, received = [0] * size.replicas, [0] * size.replicas
    errors: list[BaseException] = []
    with tempfile.TemporaryDirectory() as place:

        def live(i: int) -> None:
            engine = learners[i].engine
            rules = Rules(size.replicas, size.replicas, poll=0.01)
            schedule = SyncSchedule(size.every, outer=arm.outer)
            ledger = Ledger(Bucket.open(f"file://{place}/bucket"))
            assert arm.wire is not None
            rounds = size.updates // size.every
            outer = ReplicaOuter(engine, ledger, i, rules, schedule, arm.wire, rounds=rounds, snapshot_every=1000)
            outer.join(engine)
            engine.outer = outer
            while not outer.over:
                engine.step(learners[i].batch(learners[i].stream.next(size.rows)), en.SFT())
                if outer.between:
                    sent[i] += int(outer.manager.last["bytes_delta"])
                    received[i] += int(outer.manager.last["bytes_received"])
                    if i == 0:
                        curve.append((outer.updates, first.loss(test)))

        def kept(i: int) -> None:
            try:
                live(i)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=kept, args=(i,)) for i in range(size.replicas)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return known | {"curve": curve, "sent": sent[0], "received": received[0]}


def jobs(out: Path) -> Jobs:
    del out
    torch.set_num_threads(1)
    return {
        f"{size.model}-seed{seed}-{arm.name.replace(', ', '-').replace(' ', '-').replace('/', '_')}": partial(
            train, size, arm, seed
        )
        for size in (NANO, SMOLLM2)
        for seed in size.seeds
        for arm in ARMS
        if arm.name in size.arms
    }


HEADER = (
    "arm", "seeds", "loss after a third", "after two thirds", "at the end", "minus data-parallel",
    "kB sent per replica", "kB received", "times fewer bytes sent",
)  # fmt: skip


def tables(records: Sequence[Record]) -> list[str]:
    made = []
    for model, runs in by(records, "model").items():
        whole = {r["seed"]: r for r in runs if r["received"] is None}
        rows: list[list[object]] = []
        for arm, own in by(runs, "arm").items():
            curves = [dict(map(tuple, r["curve"])) for r in own]
            losses = [spread([c[at] for c in curves], 4) for at in (u * own[0]["updates"] // 3 for u in (1, 2, 3))]
            beside = [(r, whole[r["seed"]]) for r in own if r["seed"] in whole and r["received"] is not None]
            apart = [r["curve"][-1][1] - d["curve"][-1][1] for r, d in beside]
            received = [r["received"] / 1e3 for r in own if r["received"] is not None]
            fewer = [d["sent"] / r["sent"] for r, d in beside]
            rows.append(
                [arm, len(own), *losses, spread(apart, 4), f"{statistics.mean(r['sent'] for r in own) / 1e3:.1f}",
                 f"{statistics.mean(received):.1f}" if received else "–",
                 f"{statistics.mean(fewer):.0f}" if fewer else 1]
            )  # fmt: skip
        before = spread([r["curve"][0][1] for r in whole.values()], 4)
        head = [f"{model}: {HEADER[0]}", *HEADER[1:]]
        made.append(table(head, [["before", len(whole), "–", "–", before, "–", "–", "–", "–"], *rows]))
    return made


def figure(records: Sequence[Record], path: Path) -> None:
    models = by(records, "model")
    made, axes = plots(len(models), 7.5)
    for axis, (model, runs) in zip(axes, models.items(), strict=True):
        for arm, own in by(runs, "arm").items():
            ends = [r["curve"][-1][1] for r in own]
            marker = {"d": "D", "i": "s", "t": "^", "s": "o"}[arm[0]]
            x, y = statistics.mean(r["sent"] for r in own) / 1e3, statistics.mean(ends)
            error = statistics.stdev(ends) if len(ends) > 1 else None
            axis.errorbar(x, y, yerr=error, fmt=marker, markersize=8, capsize=3, label=arm)
        axis.set(
            xscale="log",
            yscale="log" if model == "nano" else "linear",
            xlabel="kB sent per replica",
            ylabel="held-out loss at the end, nats per token",
        )
        axis.set_title(f"{model}: {runs[0]['updates']} updates, four replicas")
        axis.legend(fontsize=8)
    made.savefig(path)


if __name__ == "__main__":
    main("replicas", jobs, tables, figure)
