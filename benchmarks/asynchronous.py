"""Wall clock and held-out reward of a run whose rollouts are slow, at sampler.staleness 0, 1 and 4.

    python benchmarks/asynchronous.py [--steps 20] [--seeds 3] [--out benchmarks/results/asynchronous.json]

The job is quickstart's on nano. Two sampler processes, each of which waits DELAY seconds before it answers a request,
as a sampler on another machine or a slow environment would. With staleness 0 the same two processes sample, and the
trainer waits for them. One thread for the trainer and for each process. Seconds are those of the training steps.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from earnest.config import RunConfig, dump, from_mapping, recipes
from earnest.engines import LocalEngine
from earnest.engines.base import Rollout
from earnest.models import SampleSpec
from earnest.runs import RunFolder
from earnest.runs.lifecycle import go
from earnest.runs.sampling import sampling_engine
from earnest.runs.setup import build
from earnest.sync.pool import SamplerPool
from earnest.sync.process import ProcessSampler

DELAY, SAMPLERS, STALENESS = 1.0, 2, (0, 1, 4)
RESULTS = Path(__file__).parent / "results" / "asynchronous.json"


def slow_engine(config: str) -> LocalEngine:
    """The engine of a sampler's process, with the delay."""
    engine = sampling_engine(config)
    inner = engine.sample

    def sample(prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[Rollout]:
        time.sleep(DELAY)
        return inner(prompts, n, spec)

    engine.sample = sample  # type: ignore[method-assign]
    return engine


def measure(config: RunConfig, staleness: int, place: Path) -> dict[str, Any]:
    from benchmarks.asynchronous import slow_engine as made  # pickled by its name

    setup = build(config, lambda _: None)
    assert setup.task is not None
    rows = [list(setup.policy.render(p.messages)) for p in setup.task.prompts("heldout", 4, 0)]
    members = [ProcessSampler(i, partial(made, dump(config))) for i in range(SAMPLERS)]
    pool = SamplerPool(setup.require_local("a benchmark"), rows, members, staleness=staleness)
    setup = replace(setup, samplers=pool)
    header = {"recipe": "benchmark", **setup.describe()}
    run = RunFolder.create(place, config, setup.policy, header)
    finished = go(setup, run, Console(file=io.StringIO()), resumed=False)
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    metrics = [step["metrics"] for step in steps]

    def mean(name: str) -> float:
        return statistics.fmean(m.get(name, 0.0) for m in metrics)

    return {
        "seconds": sum(sum(step["seconds"].values()) for step in steps),
        "before": lines[0]["reward"],
        "after": lines[-1]["reward"],
        "age": mean("sampler/age"),
        "age_max": max(m.get("sampler/age_max", 0.0) for m in metrics),
        "trainer_idle": mean("trainer/idle") if staleness else _waited(steps),
        "sampler_idle": mean("sampler/idle"),
        "ratio_max": max(t["metrics"].get("ratio_max", 1.0) for step in steps for t in step["terms"].values()),
        "finished": str(finished.folder.name),
    }


def _waited(steps: Sequence[dict[str, Any]]) -> float:
    """The share of time that a synchronous trainer waits for its samplers."""
    total = sum(sum(step["seconds"].values()) for step in steps)
    return sum(step["seconds"]["sample"] for step in steps) / total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    _, recipe = recipes.read("quickstart")
    found: dict[str, list[dict[str, Any]]] = {str(k): [] for k in STALENESS}
    for seed in range(given.seeds):
        for k in STALENESS:
            overrides = [f"seed={seed}", f"steps={given.steps}", "threads=1", "check=false", "eval.every=0"]
            with tempfile.TemporaryDirectory() as scratch:
                config = from_mapping(recipe, overrides)
                found[str(k)].append(measure(config, k, Path(scratch) / "run"))
            print(f"seed {seed}, staleness {k}: {found[str(k)][-1]}", flush=True)
            given.out.write_text(
                json.dumps({"steps": given.steps, "delay": DELAY, "samplers": SAMPLERS, "runs": found}, indent=1) + "\n"
            )
    base = statistics.fmean(r["seconds"] for r in found["0"])
    print("| staleness | seconds | speed-up | held-out reward | mean age | trainer idle | samplers idle |")
    print("|---|---|---|---|---|---|---|")
    for k, runs in found.items():
        seconds = [r["seconds"] for r in runs]
        after = [r["after"] for r in runs]
        spread = f" ± {statistics.stdev(after):.3f}" if len(after) > 1 else ""
        idle = f"{statistics.fmean(r['sampler_idle'] for r in runs):.0%}" if k != "0" else "-"
        print(
            f"| {k} | {statistics.fmean(seconds):.1f} | {base / statistics.fmean(seconds):.2f}× | "
            f"{statistics.fmean(after):.3f}{spread} | {statistics.fmean(r['age'] for r in runs):.2f} | "
            f"{statistics.fmean(r['trainer_idle'] for r in runs):.0%} | {idle} |"
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
