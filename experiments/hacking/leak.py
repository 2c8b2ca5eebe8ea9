"""python -m experiments.hacking.leak [UPDATES]: the unwanted share of the update under a guard at the gradient.

The same few updates of the experiment's first seed under each guard. At the gradient Route has an optimizer for main
and one for the quarantine, as published; its leak is the unwanted share of the step that main takes.
"""

from __future__ import annotations

import itertools
import sys

import torch

from earnest.guards import Erase, Route
from earnest.guards.gates import Gate
from earnest.guards.guard import At
from earnest.seeds import derive
from earnest.tasks import PromptStream, get_task
from experiments.hacking.config import Config
from experiments.hacking.contrasts import hacking_triples
from experiments.hacking.plan import Job
from experiments.hacking.results import over_seeds
from experiments.hacking.tables import markdown
from experiments.hacking.train import extract_directions, make_engine, train_step

UPDATES = 12
GATES: tuple[Gate, ...] = ("one_sided", "two_sided")
LEVELS: tuple[At, ...] = ("update", "gradient")


def leak_table(config: Config, updates: int = UPDATES) -> list[str]:
    """Means over the updates, one row per guard."""
    torch.set_num_threads(config.threads)
    plain = make_engine(config, config.seed, None)
    directions = extract_directions(plain, config, hacking_triples(config.triples, config.seed))
    rows = []
    for gate, at, kind in itertools.product(GATES, LEVELS, (Erase, Route)):
        engine = make_engine(config, config.seed, kind(directions, gate=gate, at=at))
        stream = PromptStream(get_task("holes"), derive(config.seed, "train") % 2**31)
        job = Job(f"{kind.__name__.lower()}@{at}", config.seed)
        steps = range(1, updates + 1)
        log = [train_step(engine, config, job, stream.next(config.prompts_per_step), None, step) for step in steps]
        told = [line for line in log if "leak_update" in line]
        means = [over_seeds([line[key] for line in told]).mean for key in ("leak_gradient", "leak_update", "removed")]
        rows.append([job.arm, gate, str(len(told)), *(f"{mean:.3f}" for mean in means)])
    return markdown(["guard", "gate", "updates", "leak, gradient", "leak, update", "removed"], rows)


if __name__ == "__main__":
    chosen = int(sys.argv[1]) if len(sys.argv) > 1 else UPDATES
    print("\n".join(leak_table(Config(experiment="hacking"), chosen)))
