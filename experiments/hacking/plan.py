"""The training runs of the experiment, and the arms that each of them provides.

Route at the update trains the unguarded run bit for bit (a law, tests/guards/test_laws.py). So ``none``, ``route`` and
the leave-one-out routes of a seed are one training run with several quarantines, each ablated for its own evaluations.
Every other arm is a separate run.
"""

from __future__ import annotations

from dataclasses import dataclass

from earnest.tasks.holes import CHECKERS
from experiments.hacking.config import Config

CONTROLS = ("random", "shuffled", "clean", "noise")
HOLES = tuple(CHECKERS)
ROUTES = ("route", *(f"route:{control}" for control in CONTROLS))

ARMS: dict[str, str] = {
    "none": "no guard",
    "erase": "Erase at the update",
    "erase:random": "Erase with random directions, as many in the same modules",
    "erase:shuffled": "Erase with the true directions' numbers at random places",
    "erase:clean": 'Erase with directions from two clean replies, one of them "unwanted" at random',
    "erase:noise": "update noise: a random vector as long as what Erase removes, in every module's update",
    "erase@gradient": "Erase at the gradient, as published",
    "route": "Route at the update; measured ablated",
    "route:random": "Route with random directions; measured ablated",
    "route:shuffled": "Route with shuffled directions; measured ablated",
    "route:clean": "Route with clean-against-clean directions; measured ablated",
    "route:noise": "update noise: a random vector as long as what Route quarantines; measured ablated",
}
"""Every arm of the main table; one without a result is shown as missing, never left out."""


@dataclass(frozen=True)
class Job:
    """One training run. ``without`` leaves a hole out of the directions; ``routes`` are the quarantines beside it."""

    arm: str
    seed: int
    without: str | None = None
    pool: bool = False
    routes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        parts = [self.arm.replace(":", "-"), f"seed{self.seed}"]
        parts += [f"without-{self.without}"] if self.without else []
        return "-".join(parts + (["pool"] if self.pool else []))


def plan(config: Config, full: bool) -> list[Job]:
    """Every job, in an order that fills the main table first."""
    if not full:
        return [Job("none", config.seed, routes=("route",)), Job("erase", config.seed)]
    seeds = [config.seed + i for i in range(config.seeds)]
    few, more = seeds[: config.few_seeds], seeds[config.few_seeds :]
    jobs = [job for seed in few for job in _main(seed, left_out=True)]
    for seed in few:
        jobs.append(Job("none", seed, pool=True, routes=("route",)))
        jobs += [Job("erase", seed, without=hole) for hole in HOLES]
    jobs += [job for seed in more for job in _main(seed, left_out=False)]
    return jobs + [Job("erase@gradient", seed) for seed in seeds]


def _main(seed: int, left_out: bool) -> list[Job]:
    holes = tuple(f"route-without-{hole}" for hole in HOLES) if left_out else ()
    return [Job("none", seed, routes=(*ROUTES, *holes)), Job("erase", seed)] + [
        Job(f"erase:{control}", seed) for control in CONTROLS
    ]
