"""Steer and heal on SmolLM2-135M: trait, coherence and rounds, mean against rmse barrier, base against previous.

    python -m experiments.evidence.healing                  what is missing; then JSON, tables and figure
    python -m experiments.evidence.healing --only seed0
    python -m experiments.evidence.healing --table

Each job is `earnest run heal-smollm2` with another barrier or reference, and more tokens and held-out questions than
the recipe has: an answer that is cut before its first full stop has a trait of 0.5.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from experiments.evidence import runs
from experiments.evidence.jobs import Jobs, Record, by, main, plots, spread, table

SEEDS = (0, 1, 2)
ARMS = [(over, reference) for over in ("rmse", "mean") for reference in ("base", "previous")]
SIZE = ("rounds=3", "steering.max_new_tokens=40", "eval.prompts=24", "eval.probes=12", "eval.texts=8")


def train(over: str, reference: str, seed: int, out: Path) -> Record:
    folder = out / f"{over}-{reference}-seed{seed}"
    words = [*SIZE, f"healing.over={over}", f"healing.reference={reference}", f"seed={seed}", f"out={folder}"]
    runs.earnest("run", "heal-smollm2", *words, *(["--resume"] if (folder / "experiment.yaml").exists() else []))
    found = json.loads((folder / "results.json").read_text())
    keys = ("trait", "mass", "fluency", "sense", "coherence")
    rounds = [
        {"firing": r["heal"]["firing"]} | {who: {k: r[who][k] for k in keys} for who in ("steered", "healed")}
        for r in found["arms"][0]["runs"][0]["rounds"]
    ]
    plain = {who: {k: found[who][k] for k in keys} for who in ("base", "prompted")}
    return {"arm": f"{over}, {reference}", "seed": seed, "rounds": rounds, **plain}


def jobs(out: Path) -> Jobs:
    return {
        f"seed{seed}-{over}-{reference}.result": partial(train, over, reference, seed, out)
        for seed in SEEDS
        for over, reference in ARMS
    }


def tables(records: Sequence[Record]) -> list[str]:
    rows: list[list[object]] = []
    for who in ("base", "prompted"):
        first = records[0][who]
        rows.append([who, "–", "–", "–", f"{first['trait']:.2f}", f"{first['coherence']:.2f}", "–", "–"])
    for arm, own in by(records, "arm").items():
        last = [r["rounds"][-1] for r in own]
        fired = [sum(x["firing"] for x in r["rounds"]) / len(r["rounds"]) for r in own]
        numbers = [spread([x[who][k] for x in last]) for who in ("healed", "steered") for k in ("trait", "coherence")]
        rows.append([arm, len(own), ", ".join(str(len(r["rounds"])) for r in own), spread(fired), *numbers])
    header = [
        "barrier, reference", "seeds", "rounds", "fires", "trait, healed", "coherence, healed", "trait, steered",
        "coherence, steered",
    ]  # fmt: skip
    return [table(header, rows)]


def figure(records: Sequence[Record], path: Path) -> None:
    made, axes = plots(2)
    for axis, what in zip(axes, ("trait", "coherence"), strict=True):
        for place, (arm, own) in enumerate(by(records, "arm").items()):
            for number, r in enumerate(own):
                values = [r["base"][what], *(x["healed"][what] for x in r["rounds"])]
                axis.plot(range(len(values)), values, "o-", color=f"C{place}", label=None if number else arm)
        axis.set(xlabel="round (0: the base)", ylabel=f"{what}, healed", xticks=range(len(values)))
        axis.legend(fontsize=8)
    made.savefig(path)


if __name__ == "__main__":
    main("healing", jobs, tables, figure)
