"""Three channels on SmolLM2-135M: rewards, feedback and preferences, alone and together, with and without a barrier.

    python -m experiments.evidence.channels                    what is missing; then JSON, tables and figure
    python -m experiments.evidence.channels --only seed0
    python -m experiments.evidence.channels --table

The model, the task and the settings are those of `experiments.evidence.learn` on chain_sum. A wrong answer's feedback
has the expected one. "logit" compares the student's 100 likeliest tokens at each position, "token" only the sampled
token, as an advantage (`engine.estimator: sampled`), "sequence" the mean of those over a completion (`sequence.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.evidence import learn, runs
from experiments.evidence.jobs import Jobs, Record, by, main, plots, spread, table

GRPO = {"kind": "grpo", "clip": 0.2}
SDPO = {"kind": "sdpo", "alpha": 0.5, "top_k": 100}
SAMPLED = {"kind": "sdpo", "alpha": 1.0, "support": "full"}
SIMPO = {"kind": "simpo", "weight": 0.1}
BARRIER = {"kind": "kl_barrier", "over": "rmse", "tau": 1.0}
TASK, SEEDS = "chain_sum", (0, 1, 2)

ARMS: dict[str, dict[str, Any]] = {
    "GRPO": {"objective": [GRPO]},
    "SDPO, logit": {"objective": [SDPO]},
    "SDPO, token": {"objective": [SAMPLED], "engine": {"estimator": "sampled"}},
    "SDPO, sequence": {
        "import": [str(Path(__file__).with_name("sequence.py"))],
        "objective": [SAMPLED | {"kind": "sdpo_sequence"}],
        "engine": {"estimator": "sampled"},
    },
    "SDPO, logit + barrier": {"objective": [SDPO, BARRIER]},
    "GRPO + SDPO": {"objective": [GRPO, SDPO]},
    "GRPO + SDPO + SimPO": {"objective": [GRPO, SDPO, SIMPO]},
    "GRPO + SDPO + SimPO + barrier": {"objective": [GRPO, SDPO, SIMPO, BARRIER]},
    "SRPO": {"objective": [GRPO | {"route": "correct"}, SDPO | {"route": "failed"}]},
}


def train(arm: str, seed: int, out: Path, warm: Path) -> Record:
    name = arm.lower().replace(" + ", "-").replace(", ", "-")
    given = learn.config(TASK, learn.warm(TASK, warm), seed) | ARMS[arm]
    given["eval"] |= {"every": learn.STEPS // 2}
    return {"arm": arm, "seed": seed, **runs.read(runs.finish(out / f"{name}-seed{seed}", given))}


def jobs(out: Path) -> Jobs:
    warm = out.parent / "learn"
    return {
        f"seed{seed}-{arm.lower().replace(' + ', '-').replace(', ', '-')}.result": partial(train, arm, seed, out, warm)
        for seed in SEEDS
        for arm in ARMS
    }


def tables(records: Sequence[Record]) -> list[str]:
    rows = []
    for arm, own in by(records, "arm").items():
        held = [[e[1] for e in r["heldout"]] for r in own]
        entropy = [[sum(r["entropy"][part]) / 5 for r in own] for part in (slice(0, 5), slice(-5, None))]
        cells = [spread([h[i] for h in held], 3) for i in (0, len(held[0]) // 2, -1)]
        rows.append([arm, len(own), *cells, *(spread(e) for e in entropy)])
    header = [
        "objective", "seeds", "held-out reward before", "halfway", "after", "entropy, first 5 steps",
        "entropy, last 5 steps",
    ]  # fmt: skip
    return [table(header, rows)]


def figure(records: Sequence[Record], path: Path) -> None:
    made, [axis] = plots(1, 10)
    for arm, own in by(records, "arm").items():
        mean = [sum(r["reward"][i] for r in own) / len(own) for i in range(len(own[0]["reward"]))]
        smooth = [sum(mean[max(0, i - 4) : i + 1]) / min(5, i + 1) for i in range(len(mean))]
        axis.plot(range(1, len(mean) + 1), smooth, label=arm)
    axis.set(xlabel="step", ylabel="training reward (mean of 5 steps and of the seeds)")
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    made.savefig(path)


if __name__ == "__main__":
    main("channels", jobs, tables, figure)
