"""``earnest audit heal``: the first round's step, on answers that survived steering."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from earnest.proving import prove as prove_step
from earnest.seeds import derive
from earnest.steering.heal import prepare_round
from earnest_audit import Verdict
from experiments.heal.arms import Bench
from experiments.heal.config import HealConfig


def prove(config: HealConfig, *, quick: bool, progress: Callable[[str], None]) -> Verdict:
    """Steer, keep the coherent answers, and prove the step that would train on them; nothing is written."""
    progress("loading the model")
    bench = Bench(config, progress)
    with tempfile.TemporaryDirectory() as nowhere:
        loop = bench.loop(Path(nowhere), config.seed)
        progress("steering, and keeping what is sane")
        survivors = loop.sample_survivors(1)[2].survivors
    prepared = prepare_round(
        bench.policy,
        survivors[: loop.healing.rows],
        loop.variant,
        loop.optimizer,
        objective=loop.healing.objective(),
        targets=loop.targets,
        layers=loop.adapter_layers,
        seed=derive(config.seed, "heal", 1) % 2**31,
        max_grad_norm=loop.max_grad_norm,
    )
    return prove_step(prepared.engine, prepared.objective, prepared.everything, quick=quick, progress=progress)
