"""The outer optimizer of replicas: `quickstart` with two replicas, for several outer learning rates and momenta.

    python benchmarks/diloco_outer.py            trains every arm (about 10 minutes), prints the table, writes
                                                 benchmarks/results/diloco_outer.json
    python benchmarks/diloco_outer.py --table    the table of the stored results

The replicas train in this process, one after the other. Their differences are averaged, and the outer step is taken, by
the code that a run with replicas uses (``WeightCopies``, ``average``, ``Globals``); no bucket and no wire are involved,
so the differences are exact fp32. Each arm trains 40 updates per replica; the held-out reward is measured on 64 prompts
with 2 completions each.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from earnest.config import load
from earnest.diloco.globals import Globals, OuterSGD
from earnest.diloco.outer import WeightCopies
from earnest.diloco.protocol import average
from earnest.diloco.worker import own_seed
from earnest.errors import NothingToTrain
from earnest.runs.collect import BatchSource
from earnest.runs.evaluate import evaluate
from earnest.runs.setup import build
from earnest.seeds import derive

RESULTS = Path("benchmarks/results/diloco_outer.json")
REPLICAS, UPDATES, SEEDS = 2, 40, (0, 1, 2)
COLUMNS = ((4, "2x4"), (4, "8x8"), (10, "8x8"))
"""(updates per round, prompts x completions per prompt of a step)"""
ROWS = (
    (1.0, 0.0, False),
    (0.5, 0.5, True),
    (0.1, 0.9, True),
    (1.0, 0.3, True),
    (0.7, 0.9, True),
    (0.7, 0.9, False),
    (7.0, 0.0, False),
)
"""(outer learning rate, momentum, Nesterov)"""
ONLY_EVERY_4 = {ROWS[1], ROWS[3], ROWS[6]}


def train(every: int, shape: str, outer: tuple[float, float, bool], seed: int, updates: int = UPDATES) -> list[float]:
    """The held-out reward before and after, of ``updates`` updates per replica in rounds of ``every``."""
    prompts, completions = shape.split("x")
    sampling = [f"sampling.prompts_per_step={prompts}", f"sampling.completions_per_prompt={completions}"]
    settings = [f"seed={seed}", *sampling, "threads=1", "eval.prompts=64", "eval.samples=2"]
    _, config = load("quickstart", settings)
    setups = [replace(build(config, lambda _: None), config=own_seed(config, r)) for r in range(REPLICAS)]
    copies = [WeightCopies(setup.engine, 1) for setup in setups]
    agreed = Globals(copies[0].tensors(), OuterSGD(*outer))
    sources = [BatchSource(setup) for setup in setups]
    before = evaluate(setups[0], 0).reward
    for start in range(0, updates, every):
        deltas, tokens = [], []
        for setup, own, source in zip(setups, copies, sources, strict=True):
            count = setup.engine.tokens
            for step in range(start + 1, start + every + 1):
                torch.manual_seed(derive(setup.config.seed, "step", step))
                with suppress(NothingToTrain):  # such a step counts and changes nothing, as in a run
                    setup.engine.step(source.next(step).batch, setup.objective)
            own.pull(setup.engine)
            deltas.append(agreed.current.flat() - torch.cat([t.reshape(-1) for t in own.tensors()[0]]))
            tokens.append(setup.engine.tokens - count)
        agreed.advance(average(deltas, tokens))
        for setup, own in zip(setups, copies, strict=True):
            own.become(agreed)
            own.push(setup.engine)
    return [before, evaluate(setups[0], updates).reward]


def table(rows: Sequence[dict[str, Any]]) -> str:
    found: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for row in rows:
        key = (row["every"], row["shape"], row["lr"], row["momentum"], row["nesterov"])
        found.setdefault(key, []).append((row["seed"], row["after"]))
    heads = (f"every {every}, {shape.replace('x', ' × ')}" for every, shape in COLUMNS)
    lines = [f"| `lr`, `momentum` | factor | {' | '.join(heads)} |", "|---|---|---|---|---|"]
    for lr, momentum, nesterov in ROWS:
        default = (lr, momentum) == (1.0, 0.0)
        name = f"**{lr:g}, {momentum:g}** (default)" if default else f"{lr:g}, {momentum:g}"
        name += " without Nesterov" if momentum and not nesterov else ""
        cells = [
            " ".join(f"{after:.2f}" for _, after in sorted(found.get((*column, lr, momentum, nesterov), [])))
            for column in COLUMNS
        ]
        lines.append(f"| {name} | {lr / (1 - momentum):.2g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--table", action="store_true", help="print the table of the stored results")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(given.json.read_text())["rows"]))
        return 0
    rows: list[dict[str, Any]] = []
    for seed in SEEDS:
        for every, shape in COLUMNS:
            for outer in ROWS:
                if every != 4 and outer in ONLY_EVERY_4:
                    continue
                began = time.perf_counter()
                before, after = train(every, shape, outer, seed)
                rows.append(
                    {
                        "every": every,
                        "shape": shape,
                        "lr": outer[0],
                        "momentum": outer[1],
                        "nesterov": outer[2],
                        "seed": seed,
                        "before": before,
                        "after": after,
                        "seconds": round(time.perf_counter() - began, 1),
                    }
                )
                print(rows[-1], file=sys.stderr, flush=True)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
