"""The loop: per round, find the direction in the current student, steer, filter the samples, train on them, evaluate.

A round is a folder: the vector, the adapter, and ``record.json``, which is written last. A loop that is called again
with the same settings and folder continues after the last complete round, with the same numbers: every random draw is
a function of the seed, the round and its purpose.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from earnest.adapters import Adapter, LoRA, load_adapter, without_adapters
from earnest.adapters.variant import Variant
from earnest.disk import write_json
from earnest.engines.optimizers import AdamW, Optimizer
from earnest.errors import CheckpointError, EarnestError
from earnest.models.policy import Policy
from earnest.models.sampling import SampleSpec
from earnest.models.slots import sample
from earnest.objectives.base import Objective
from earnest.objectives.sft import SFT
from earnest.objectives.trust import AGGREGATES, KLBarrier
from earnest.seeds import derive
from earnest.settings import Checked, setting
from earnest.steering.controller import DoseSearch, walk_down
from earnest.steering.dose import Dose, calibrate_dose, states
from earnest.steering.errors import Collapsed, SteeringError, SteeringWarning
from earnest.steering.evaluate import TraitEvaluation, TraitEvaluator
from earnest.steering.filter import Filter, Separation, SteeredSample, read, separation
from earnest.steering.heal import NEVER, Healing, demonstrations, heal
from earnest.steering.vectors import Contrast, Vector, mean_difference, principal, weight_space
from earnest.tasks.base import Task

Say = Callable[[str], None]
MAKERS: dict[str, Callable[..., Vector]] = {"mean": mean_difference, "pca": principal, "svd": weight_space}


@dataclass(frozen=True, kw_only=True)
class Steering(Checked):
    """The steering settings of a round: the vector, its dose in nats, the numbers of samples and of survivors.

    ``against``: the policy from which the dose is measured. "student": the steered policy, so every round steers by the
    same amount; "base": the divergence of earlier rounds counts, so later rounds steer less (none left is an error).
    """

    error: ClassVar[type[EarnestError]] = SteeringError

    method: str = setting("mean", "how the vector is made from the contexts", choices=tuple(MAKERS))
    contexts: int = setting(32, "pairs of contexts from which the vector is made", at_least=1)
    layers: tuple[int, ...] | None = setting(None, "blocks that are steered, negative from the end; none: all")
    nats: float = setting(1.0, "the dose: the 95th percentile of the tokens' KL, in nats", above=0.0)
    against: str = setting("student", "the policy from which the dose is measured", choices=("student", "base"))
    questions: int = setting(96, "questions per dose", at_least=1)
    enough: int = setting(48, "answers that must survive the filter", at_least=1)
    factor: float = setting(0.75, "the next dose as a share of the previous one", above=0.0, below=1.0)
    tries: int = setting(6, "doses that are tried", at_least=1)
    max_new_tokens: int = setting(48, "the longest answer, in tokens", at_least=1)
    temperature: float = setting(1.0, "the sampling temperature", at_least=0.0)
    overdose: float = setting(
        8.0, "the multiple of the dose at which broken answers are sampled to test the filter", above=1.0
    )

    def validate(self) -> None:
        if self.enough > self.questions:
            raise SteeringError(f"enough is {self.enough}; with {self.questions} questions give 1 to {self.questions}.")


@dataclass(frozen=True)
class SteeringResult:
    """The records of all finished rounds, the evaluation of the base, and the reason if the loop ended early."""

    records: tuple[dict[str, Any], ...]
    before: dict[str, Any]
    stopped: str | None


class Loop:
    """R rounds of steering and training on one policy. ``close`` removes the adapters."""

    def __init__(
        self,
        policy: Policy,
        task: Task,
        contrast: Contrast,
        evaluator: TraitEvaluator,
        folder: Path,
        *,
        steering: Steering | None = None,
        healing: Healing | None = None,
        limits: Filter | None = None,
        variant: Variant | None = None,
        optimizer: Optimizer | None = None,
        targets: str | Sequence[str] | None = None,
        adapter_layers: Sequence[int] | None = None,
        max_grad_norm: float | None = 1.0,
        seed: int = 0,
        say: Say = lambda text: None,
    ) -> None:
        self.policy, self.task, self.contrast, self.evaluator, self.folder = policy, task, contrast, evaluator, folder
        self.steering, self.healing, self.limits = steering or Steering(), healing or Healing(), limits or Filter()
        self.variant, self.optimizer = variant or LoRA(rank=8), optimizer or AdamW(lr=2e-3)
        self.targets, self.adapter_layers, self.max_grad_norm = targets, adapter_layers, max_grad_norm
        self.seed, self.say = seed, say
        self.history: list[Adapter] = []
        self.vectors: list[Vector] = []
        self.records: list[dict[str, Any]] = []
        self._base = policy.fingerprint()
        self._limits: tuple[Filter, list[SteeredSample]] | None = None
        for number, record in finished_rounds(folder):
            adapter = load_adapter(policy, folder / f"round-{number}" / "adapter")
            adapter.freeze()
            self.history.append(adapter)
            self.vectors.append(Vector.load(folder / f"round-{number}" / "vector.safetensors"))
            self.records.append(record)

    def run(self, rounds: int, before: TraitEvaluation) -> SteeringResult:
        """Run the missing rounds; stop early if coherence falls below the floor."""
        if before.coherence < before.floor:
            raise Collapsed(
                f"{self.policy.name} has a coherence of {before.coherence:.2f} before steering, the floor "
                f"is {before.floor:g}; lower the floor, or use another model."
            )
        stopped = self._stopped()
        while len(self.records) < rounds and stopped is None:
            self.round()
            stopped = self._stopped()
        if self.policy.fingerprint(fresh=True) != self._base:
            raise SteeringError("the base's weights changed during the loop; only adapters may be trained.")
        return SteeringResult(tuple(self.records), before.to_dict(), stopped)

    def _stopped(self) -> str | None:
        if not self.records:
            return None
        last = self.records[-1]
        healed = last["healed"]
        if healed["coherence"] >= healed["floor"]:
            return None
        return f"round {last['round']}: coherence {healed['coherence']:.2f} is below the floor of {healed['floor']:g}"

    def close(self) -> None:
        """Detach every adapter, newest first."""
        for adapter in reversed(self.history):
            adapter.detach()
        self.history.clear()

    # --- one round ----------------------------------------------------------------------------------------------------

    def round(self) -> dict[str, Any]:
        """Steer, sample, train, evaluate. The record is also written to the round's folder."""
        number, begun = len(self.records) + 1, time.monotonic()
        place = self.folder / f"round-{number}"
        place.mkdir(parents=True, exist_ok=True)
        vector, dose, search, separated = self.sample_survivors(number)
        steered = self.evaluator.measure(within=lambda: self._acting(vector, search.dose))
        healed = heal(
            self.policy,
            search.survivors,
            self.variant,
            self.optimizer,
            how=self.healing,
            targets=self.targets,
            layers=self.adapter_layers,
            round_number=number - 1,
            seed=derive(self.seed, "heal", number) % 2**31,
            max_grad_norm=self.max_grad_norm,
        )
        self.history.append(healed.adapter)
        after = self.evaluator.measure(within=self._acting)
        summary = healed.summary()
        record: dict[str, Any] = {
            "round": number,
            "dose": {"coefficient": dose.coefficient, "kl": dose.kl, "target": dose.target, "used": search.dose},
            "tries": [asdict(t) for t in search.tries],
            "survivors": len(search.survivors),
            "filter": None if separated is None else asdict(separated) | {"separates": separated.separates},
            "vector": {"made": vector.made, "norm": vector.norm, **self._drift(vector)},
            "heal": summary,
            "steered": steered.to_dict(),
            "healed": after.to_dict(),
            "samples": [s.text for s in search.survivors[:4]],
            "seconds": time.monotonic() - begun,
        }
        healed.adapter.save(place / "adapter", self.policy.name)
        vector.save(place / "vector.safetensors")
        write_json(place / "record.json", record)
        self.vectors.append(vector)
        self.records.append(record)
        self.say(
            f"round {number}: trait {after.trait:.2f} (steered {steered.trait:.2f}), coherence {after.coherence:.3f} "
            f"(steered {steered.coherence:.3f}; mass {after.mass:.3f}, sense {after.sense:.2f}), "
            f"{len(search.survivors)} survivors at dose {search.dose:.2f}, barrier/SFT {summary['pressure']:.2f}, "
            f"{record['seconds']:.0f} s" + ("" if separated is None else f"; {separated}")
        )
        return record

    def sample_survivors(self, number: int) -> tuple[Vector, Dose, DoseSearch, Separation | None]:
        """The student's vector, its dose, the steered answers that survive, and the test of the filter."""
        how = self.steering
        vector = self.extract(number)
        questions = self.task.prompts("train", how.questions, derive(self.seed, "questions", number))
        prompts = [self.policy.render(q.messages) for q in questions]
        limits, good = self._filter()
        answers = demonstrations(self.policy, good)  # of the base, so that every round is measured on the same tokens
        home = None
        if how.against == "base":
            with without_adapters(self.policy):
                home = states(self.policy, answers)
        with self._merged():
            dose = calibrate_dose(self.policy, vector, answers, how.nats, base=home)

        def steered(coefficient: float) -> list[SteeredSample]:
            return self._sample(prompts, "steered", number, lambda: self._acting(vector, coefficient))

        search = walk_down(steered, limits, dose.coefficient, how.enough, factor=how.factor, tries=how.tries)
        if number > 1:
            return vector, dose, search, None
        too_much = how.overdose * dose.coefficient
        broken = self._sample(prompts[: len(good)], "broken", number, lambda: self._acting(vector, too_much))
        separated = separation(limits, good, broken)
        if not separated.separates:
            warnings.warn(
                f"{separated}; survivors may be as broken as the others: set the filter's limits, or read the samples.",
                SteeringWarning,
                stacklevel=2,
            )
        return vector, dose, search, separated

    def extract(self, number: int) -> Vector:
        """The vector of the current student."""
        how = self.steering
        questions = self.task.prompts("train", how.contexts, derive(self.seed, "contexts", number))
        high, low = self.contrast.contexts(self.policy, questions)
        with self._merged():
            return MAKERS[how.method](self.policy, high, low, how.layers)

    def _drift(self, vector: Vector) -> dict[str, float]:
        """Cosines of the vector with those of the first and of the last round."""
        first, previous = (self.vectors[0], self.vectors[-1]) if self.vectors else (vector, vector)
        return {"cosine_first": vector.cosine(first), "cosine_previous": vector.cosine(previous)}

    def _filter(self) -> tuple[Filter, list[SteeredSample]]:
        """The filter with a perplexity limit from the base's own answers, and those answers."""
        if self._limits is None:
            questions = self.task.prompts("train", self.steering.contexts, derive(self.seed, "good", 0))
            prompts = [self.policy.render(q.messages) for q in questions]
            good = self._sample(prompts, "good", 0, lambda: without_adapters(self.policy))
            self._limits = (
                self.limits if self.limits.tail_perplexity is not None else self.limits.calibrated(good),
                good,
            )
        return self._limits

    @contextmanager
    def _acting(self, vector: Vector | None = None, dose: float = 0.0) -> Iterator[None]:
        """The student, steered if a vector is given, with merged adapters where possible."""
        with self._merged(), nullcontext() if vector is None else vector.applied(self.policy, dose):
            yield

    def _merged(self) -> Any:
        """Merge active adapters for faster sampling. Not in 16 bits, which would round them, and not for quantised
        layers, which have no dense weight."""
        ready = self.history and self.policy.model.dtype.itemsize >= 4 and self.history[-1].mergeable
        return self.history[-1].merged() if ready else nullcontext()

    def _sample(
        self,
        prompts: Sequence[Sequence[int]],
        purpose: str,
        number: int,
        acting: Callable[[], Any] | None = None,
    ) -> list[SteeredSample]:
        """One answer per prompt, by the student or within the given block, each scored by the base."""
        how = self.steering
        seed = derive(self.seed, purpose, number) % 2**31
        spec = SampleSpec(max_new_tokens=how.max_new_tokens, temperature=how.temperature, seed=seed)
        with (acting or self._acting)():
            found = sample(self.policy, prompts, 1, spec)
        return read(self.policy, [prompts[c.prompt_index] for c in found], [c.tokens for c in found])


def finished_rounds(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, record) of the complete rounds from 1 on; rounds after a gap are not read."""
    number = 1
    while (path := folder / f"round-{number}" / "record.json").exists():
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{path} is not JSON ({error}); remove {path.parent} to repeat that round.") from None
        yield number, record
        number += 1


def observer(reference: str = "previous") -> Objective:
    """SFT with one barrier per aggregate that only measures: one training run, four measurements per batch."""
    found = Objective.of(SFT())
    for over in AGGREGATES:
        found = found + KLBarrier(over=over, tau=NEVER, reference=reference, name=over)
    return found


def equal_firing(readings: Mapping[str, Sequence[float]], rate: float) -> dict[str, float]:
    """For every aggregate the τ that its measurements exceed in a share ``rate`` of the steps.

    Aggregates need different τ: at one τ a mean is almost never above it and a maximum always is, so a comparison at
    one τ would compare strengths instead of aggregates.
    """
    if not 0 < rate < 1:
        raise SteeringError(f"rate is {rate}; it is a share of the steps between 0 and 1.")
    return {
        over: float(torch.tensor(list(values), dtype=torch.float64).quantile(1 - rate))
        for over, values in readings.items()
    }
