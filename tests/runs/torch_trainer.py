"""A run whose two ranks Ray's TorchTrainer starts: python -m tests.runs.torch_trainer STORAGE OVERRIDE…"""

from __future__ import annotations

import sys

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from earnest.sync.cluster import connect


def rank(given: dict[str, list[str]]) -> None:
    """One rank of the run."""
    from earnest.config import load
    from earnest.runs import start

    start(*load("quickstart", given["overrides"]))


if __name__ == "__main__":
    connect("", 3)
    TorchTrainer(
        rank,
        train_loop_config={"overrides": sys.argv[2:]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=sys.argv[1]),
    ).fit()
