"""Run what is left of the experiment in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from earnest.disk import write_json
from experiments.heal.arms import ARMS, Arm, Bench, all_arms
from experiments.heal.config import HealConfig

RESULTS = "results.json"


def start(config: HealConfig, *, full: bool, folder: Path, console: Console) -> Path:
    """One loop, or every arm of every seed. Returns the page with table, figure and samples."""
    from experiments.heal.page import write_page

    total = config.full.rounds * len(config.full.seeds) * ARMS if full else config.rounds
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        rounds = bar.add_task("rounds", total=total)

        def say(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        bench = Bench(config, say, lambda done: bar.advance(rounds, done))
        bench.look()
        write_results(folder, bench, _full(bench, folder) if full else [_one(bench, folder)])
    return write_page(folder)


def _one(bench: Bench, folder: Path) -> dict[str, Any]:
    config, how = bench.config, bench.config.build_healing()
    arm = Arm(how.over, how.reference, "given", how.tau)
    place = folder / "loop"
    loop = bench.loop(place, config.seed)  # a starved loop is an error here, with the way out
    try:
        outcome = loop.run(config.rounds, bench.before)
    finally:
        loop.close()
    if outcome.stopped is not None:
        bench.say(f"stopped: {outcome.stopped}")
    return _entry(arm, [{"seed": config.seed, "rounds": list(outcome.records), "stopped": outcome.stopped}])


def _full(bench: Bench, folder: Path) -> list[dict[str, Any]]:
    config = bench.config
    calibrated = bench.calibrate(folder, config.full.rate)
    bench.say("calibrated tau: " + ", ".join(f"{over} {tau:.3g}" for over, tau in calibrated.items()))
    arms = all_arms(config.build_healing().tau, calibrated)
    runs: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    # Seed by seed: an interrupted run has every arm of its first seeds.
    for seed in config.full.seeds:
        for arm in arms:
            bench.say(f"{arm.name}, seed {seed}")
            place = folder / arm.name / f"seed-{seed}"
            settings = {"over": arm.over, "reference": arm.reference, "tau": arm.tau}
            runs[arm.name].append(bench.run(place, config.full.rounds, seed, **settings))
            write_results(folder, bench, [_entry(a, runs[a.name]) for a in arms if runs[a.name]])
    return [_entry(arm, runs[arm.name]) for arm in arms]


def _entry(arm: Arm, runs: list[dict[str, Any]]) -> dict[str, Any]:
    facts = {"name": arm.name, "over": arm.over, "reference": arm.reference, "taus": arm.taus, "tau": arm.tau}
    return facts | {"runs": runs}


def write_results(folder: Path, bench: Bench, arms: list[dict[str, Any]]) -> None:
    config = bench.config
    write_json(
        folder / RESULTS,
        {
            "model": config.model,
            "task": config.task,
            "base": bench.before.to_dict(),
            "prompted": bench.prompted.to_dict() | {"system": bench.contrast.high[0]},
            "seconds": bench.seconds + sum(r["seconds"] for arm in arms for run in arm["runs"] for r in run["rounds"]),
            "arms": arms,
        },
    )


def read_results(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
