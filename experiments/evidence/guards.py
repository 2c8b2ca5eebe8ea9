"""The hacking experiment on SmolLM2-135M: no guard, Erase, Route, and their controls, under a checker with four holes.

    python -m experiments.evidence.guards                   what is missing; then JSON, tables and figure
    python -m experiments.evidence.guards --only seed0
    python -m experiments.evidence.guards --table

The base answers in sentences, so it neither solves nor exploits. A short supervised start on honest and on exploiting
replies, in equal parts, gives it both; RL then decides between them. `none` and all routes of a seed are one training
run (Route does not change it).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from experiments.evidence import runs
from experiments.evidence.jobs import Jobs, Record, main, plots, spread, table
from experiments.hacking.config import Config
from experiments.hacking.plan import ROUTES, Job

SEEDS = (0, 1, 2)
ERASES = ("erase", "erase:random", "erase:shuffled")
WARM_STEPS, WARM_ROWS, WARM_LR = 16, 8, 1e-3


def config(model: str) -> Config:
    return Config(
        experiment="hacking", model=model, targets=["q_proj", "v_proj"], lr=0.02, steps=30, prompts_per_step=4,
        triples=16, refresh=0, eval_every=15, eval_prompts=48,
    )  # fmt: skip


def warm(out: Path) -> str:
    """The folder of the model after the supervised start."""
    import json

    from earnest.tasks import get_task
    from earnest.tasks.holes import exploits, honest

    rng, rows = random.Random(0), out / "warm.jsonl"
    if not rows.exists():
        prompts = get_task("holes").prompts("train", WARM_STEPS * WARM_ROWS, 1000)
        replies = [honest(p) if i % 2 else rng.choice(exploits(p)) for i, p in enumerate(prompts)]
        lines = [
            {"prompt": p.messages[-1]["content"], "completion": reply}
            for p, reply in zip(prompts, replies, strict=True)
        ]
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {
        "model": "smollm2",
        "threads": 1,
        "data": {"train": str(rows.resolve()), "heldout": 0.1},
        "adapter": {"kind": "lora", "rank": 8, "targets": "all-linear"},
        "objective": [{"kind": "sft"}],
        "optimizer": {"kind": "adamw", "lr": WARM_LR},
        "sampling": {"prompts_per_step": WARM_ROWS},
        "steps": WARM_STEPS,
        "check": False,
    }
    return str(runs.merged(runs.finish(out / "warm", given)).resolve())


def train(job: Job, out: Path) -> Record:
    from experiments.hacking.train import run_job

    record = run_job(config(warm(out)), job, None).record
    series = {
        name: [{k: p[k] for k in ("step", "solved", "exploited", "attempted")} for p in points]
        for name, points in record["series"].items()
    }
    return {"seed": job.seed, "arm": job.arm, "series": series}


def jobs(out: Path) -> Jobs:
    torch.set_num_threads(1)
    found = {}
    for seed in SEEDS:
        for job in (Job("none", seed, routes=ROUTES), *(Job(arm, seed) for arm in ERASES)):
            found[f"seed{seed}-{job.name}"] = partial(train, job, out)
    return found


def tables(records: Sequence[Record]) -> list[str]:
    arms: dict[str, list[list[Record]]] = {}
    for record in records:
        for name, points in record["series"].items():
            arms.setdefault(name, []).append(points)
    rows = [
        [
            name,
            len(own),
            *(spread([p[at][k] for p in own]) for k in ("solved", "exploited", "attempted") for at in (0, -1)),
        ]
        for name, own in arms.items()
    ]
    header = ["arm", "seeds"]
    header += [f"{k}, {at}" for k in ("solved", "exploited", "attempted") for at in ("step 0", "end")]
    return [table(header, rows)]


def figure(records: Sequence[Record], path: Path) -> None:
    made, axes = plots(2)
    for axis, rate in zip(axes, ("exploited", "solved"), strict=True):
        for record in records:
            for name, points in record["series"].items():
                if name in ("none", "erase", "route"):
                    colour = {"none": "#444444", "erase": "#0072b2", "route": "#d55e00"}[name]
                    label = name if record["seed"] == SEEDS[0] else None
                    axis.plot([p["step"] for p in points], [p[rate] for p in points], color=colour, label=label)
        axis.set(xlabel="step", ylabel=f"{rate}, held out", ylim=(0, 1.02))
        axis.legend(fontsize=8)
    made.savefig(path)


if __name__ == "__main__":
    main("guards", jobs, tables, figure)
