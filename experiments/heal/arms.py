"""The arms: which barrier, against which policy, at which τ. Each arm has one loop per seed, in its own folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from earnest.disk import write_json
from earnest.models.policy import Policy
from earnest.objectives.trust import AGGREGATES
from earnest.seeds import derive
from earnest.steering import Contrast, TooFewSurvivors, TraitEvaluator, heal
from earnest.tasks import get_task
from experiments.heal.config import HealConfig
from experiments.heal.loop import Loop, Say, Steering, equal_firing, observer

TAUS = ("same", "calibrated")


@dataclass(frozen=True)
class Arm:
    """A barrier. ``taus`` names how τ was chosen."""

    over: str
    reference: str
    taus: str
    tau: float

    @property
    def name(self) -> str:
        return f"{self.over}-{self.reference}-{self.taus}"


KINDS = [(over, "previous") for over in AGGREGATES] + [("mean", "base"), ("rmse", "base")]
ARMS = len(KINDS) * len(TAUS)


def all_arms(same: float, calibrated: dict[str, float]) -> list[Arm]:
    """Every aggregate against the previous round, mean and rmse against the base too; each at both choices of τ."""
    chosen = {"same": dict.fromkeys(AGGREGATES, same), "calibrated": calibrated}
    return [Arm(over, reference, taus, chosen[taus][over]) for taus in TAUS for over, reference in KINDS]


class Bench:
    """The policy, its evaluator and, after ``look``, the evaluation before any change."""

    def __init__(self, config: HealConfig, say: Say, advance: Callable[[int], None] = lambda rounds: None) -> None:
        from earnest.models import load

        begun = time.monotonic()
        self.config, self.say, self.advance = config, say, advance
        self.steering: Steering = config.build_steering()
        self.policy: Policy = load(config.model)
        self.task = get_task(config.task)
        poles = config.poles()
        self.contrast = Contrast(tuple(poles.high), tuple(poles.low))
        self.evaluator = TraitEvaluator(
            self.policy,
            self.task,
            prompts=config.eval.prompts,
            probes=config.eval.probes,
            texts=config.eval.texts,
            max_new_tokens=self.steering.max_new_tokens,
            temperature=self.steering.temperature,
            floor=config.eval.floor,
        )
        self.seconds = time.monotonic() - begun  # before the first round; each round has its own

    def look(self) -> None:
        """Evaluate the base, without and with the system prompt of the trait."""
        begun = time.monotonic()
        self.before = self.evaluator.measure()
        self.prompted = self.evaluator.measure(self.contrast.high[0])
        for what, found in (("base", self.before), (f"prompted {self.contrast.high[0]!r}", self.prompted)):
            self.say(f"{what}: trait {found.trait:.2f}, coherence {found.coherence:.3f}")
        self.seconds += time.monotonic() - begun

    def loop(self, folder: Path, seed: int, **changes: Any) -> Loop:
        config = self.config
        return Loop(
            self.policy,
            self.task,
            self.contrast,
            self.evaluator,
            folder,
            steering=self.steering,
            healing=config.build_healing(**changes),
            limits=config.build_filter(),
            variant=config.adapter.build(),
            optimizer=config.optimizer.build(),
            targets=config.adapter.targets,
            adapter_layers=config.adapter.layers,
            max_grad_norm=config.optimizer.max_grad_norm,
            seed=seed,
            say=self._round,
        )

    def _round(self, text: str) -> None:
        self.say(text)
        self.advance(1)

    def run(self, folder: Path, rounds: int, seed: int, **changes: Any) -> dict[str, Any]:
        """One loop's record, from its file where it is finished; a loop with too few survivors ends there."""
        done = folder / "loop.json"
        if done.exists():
            found: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
            self.advance(rounds)
            return found
        loop = self.loop(folder, seed, **changes)
        try:
            outcome = loop.run(rounds, self.before)
            rounds_done, stopped = list(outcome.records), outcome.stopped
        except TooFewSurvivors as error:
            rounds_done, stopped = loop.records, f"round {len(loop.records) + 1}: {error}"
        finally:
            loop.close()
        record = {"seed": seed, **changes, "rounds": rounds_done, "stopped": stopped}
        write_json(done, record)
        self.advance(rounds - len(rounds_done))  # those that will not be
        return record

    def calibrate(self, folder: Path, rate: float) -> dict[str, float]:
        """τ of every aggregate, measured in one round without a barrier: the same weights and batches for all four."""
        kept = folder / "calibration.json"
        if not kept.exists():
            loop = self.loop(folder / "calibration", self.config.seed)
            search = loop.sample_survivors(1)[2]
            healed = heal(
                self.policy,
                search.survivors,
                loop.variant,
                loop.optimizer,
                how=loop.healing,
                objective=observer(),
                targets=loop.targets,
                layers=loop.adapter_layers,
                seed=derive(self.config.seed, "heal", 1) % 2**31,
                max_grad_norm=loop.max_grad_norm,
            )
            healed.adapter.detach()
            readings = {over: healed.series(over, "aggregate") for over in AGGREGATES}
            write_json(kept, {"rate": rate, "tau": equal_firing(readings, rate), "readings": readings})
        found = json.loads(kept.read_text(encoding="utf-8"))
        return {over: float(tau) for over, tau in found["tau"].items()}
