"""The batches of an asynchronous run: sampled and graded while the trainer trains, recorded, and replayed from that
record.

``rollouts.jsonl`` has a line for every step: the batch, the digest of the weights that were trained, and for every
rollout its tokens, log-probs, version and grade. That is all that training depends on besides the config, so a replay
needs no sampler and no grader, and its weights are compared with the recorded ones at every step.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from earnest.errors import CheckpointError, EarnestError
from earnest.rollouts import Attempt, Rollout, Rollouts
from earnest.rollouts.attempts import Sample
from earnest.rollouts.conversing import Conversations
from earnest.rollouts.ledger import RolloutLedger, TakenBatch
from earnest.rollouts.trajectory import Trajectory
from earnest.runs.collect import BatchSource, attempt
from earnest.runs.folder import ROLLOUTS, RunFolder
from earnest.runs.setup import Setup
from earnest.sync.base import Weights
from earnest.sync.flow import Flow
from earnest.sync.partial import pieces
from earnest.sync.pool import CHECKED, SamplerPool, share
from earnest.tasks import Grade, Prompt

_ROLLOUT: TypeAdapter[Rollout | Trajectory] = TypeAdapter(Rollout | Trajectory)
_GRADE = TypeAdapter(Grade)


@dataclass(frozen=True)
class SampledPart:
    """What one sampler made of a batch; ``drawn``: what it returned for each conversation; ``fresh``: the first with
    its weights."""

    attempts: tuple[Attempt, ...]
    drawn: Mapping[tuple[int, int], Sequence[Rollout]]
    fresh: bool


class BatchesAhead(BatchSource):
    """Batches that samplers make ahead of the trainer. The first call of ``next`` starts them."""

    def __init__(self, setup: Setup, pool: SamplerPool, run: RunFolder, state: Mapping[str, Any] | None) -> None:
        super().__init__(setup)
        self.pool, self.record = pool, run.record_rollouts()
        updates = setup.config.updates_per_batch
        in_flight = pool.staleness // updates + 1
        parts = math.ceil(len(pool.links) / in_flight)  # as few as keep every sampler busy
        self.ledger: RolloutLedger[SampledPart] = RolloutLedger(pool.staleness, updates, parts)
        if state is not None:
            self.ledger.restore(state, setup.engine.version)
        self._flow: Flow[SampledPart] | None = None
        self._stream_lock = threading.Lock()

    def state(self) -> dict[str, Any]:
        return super().state() | self.ledger.state()

    def next(self, step: int) -> Rollouts:
        if self._flow is None:
            self._flow = self.pool.ahead(self.ledger, self._work)
        else:
            self._flow.publish(self.pool.target())
        flow, version = self._flow, self.setup.engine.version
        waiting = self.ledger.ready
        taken = flow.take()
        attempts = sorted(
            (a for _, part in taken.parts for a in part.attempts),
            key=lambda a: (a.rollout.prompt_index, a.rollout.sample_index),
        )
        spec = self.spec(taken.batch + 1)
        for ticket, part in taken.parts:
            rollouts = [a.rollout for a in part.attempts]
            later = [r for r in rollouts if any(one.policy_version > ticket.version for one in pieces(r))]
            first = rollouts if part.fresh else later
            self.pool.accept(rollouts, first[:CHECKED], spec, ticket.version)
        made = Conversations(attempts, {key: own for _, part in taken.parts for key, own in part.drawn.items()})
        found = self.collect(taken.batch + 1, self.prompts(taken.batch), made)
        self.record.append(record(step, taken, version, self.pool.target().weights, made))
        return replace(found, metrics=found.metrics | self.pool.metrics | self._metrics(taken, version, waiting, flow))

    def prompts(self, batch: int) -> list[Prompt]:
        count = self.setup.config.sampling.prompts_per_step
        assert self.stream is not None, "samplers need a task"
        with self._stream_lock:
            self.stream.position = batch * count
            return self.stream.next(count)

    def _work(self, batch: int, part: int, sample: Sample, fresh: bool) -> SampledPart:
        """In a sampler's thread: sample and grade its prompts of the batch."""
        setup, prompts = self.setup, self.prompts(batch)
        places = share([tuple(setup.policy.render(p.messages)) for p in prompts], self.ledger.parts)[part]
        if not places:
            return SampledPart((), {}, fresh)
        count, own = setup.config.sampling.completions_per_prompt, [prompts[i] for i in places]
        made = attempt(setup, own, count, self.spec(batch + 1), sample=sample)
        attempts = [
            replace(a, rollout=replace(a.rollout, prompt_index=places[a.rollout.prompt_index])) for a in made.attempts
        ]
        drawn = {(places[i], j): tuple(found) for (i, j), found in made.drawn.items()}
        return SampledPart(tuple(attempts), drawn, fresh)

    def _metrics(
        self, taken: TakenBatch[SampledPart], version: int, waiting: int, flow: Flow[SampledPart]
    ) -> dict[str, float]:
        """Ages are in versions and weighted by tokens; idle shares are of the time since the step before."""
        rollouts = [a.rollout for _, part in taken.parts for a in part.attempts]
        continued = [len({one.policy_version for one in pieces(r)}) > 1 for r in rollouts]
        ages = [(version - one.policy_version, len(one.tokens)) for r in rollouts for one in pieces(r)]
        tokens = sum(count for _, count in ages)
        return {
            "sampler/age": sum(age * count for age, count in ages) / max(tokens, 1),
            "sampler/age_max": float(max((age for age, _ in ages), default=0)),
            "sampler/continued": sum(continued) / max(len(rollouts), 1),
            "sampler/queue": float(waiting),
            "sampler/again": float(self.ledger.again),
            "sampler/restarts": self.pool.metrics["sampler/restarts"] + flow.restarts,
            "sampler/idle": flow.samplers.share(),
            "trainer/idle": flow.trainer.share(),
        }


def record(
    step: int, taken: TakenBatch[SampledPart], version: int, weights: Weights, made: Conversations
) -> dict[str, Any]:
    """A line of rollouts.jsonl. A conversation also has what the sampler returned for each of its turns."""
    return {
        "step": step,
        "batch": taken.batch,
        "version": version,
        "digest": weights.digest,
        "versions": [ticket.version for ticket, _ in taken.parts],
        "rows": [
            {
                "rollout": _ROLLOUT.dump_python(a.rollout, mode="json"),
                "text": a.text,
                "grade": _GRADE.dump_python(a.grade, mode="json"),
                "drawn": [
                    _ROLLOUT.dump_python(r, mode="json")
                    for r in made.drawn.get((a.rollout.prompt_index, a.rollout.sample_index), ())
                ],
            }
            for a in made.attempts
        ],
    }


class ReplayedBatches(BatchSource):
    """The batches that an asynchronous run recorded in ``folder``, in the order in which they were trained."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        super().__init__(setup)
        self.folder, self._lines = folder, _lines(folder)

    def next(self, step: int) -> Rollouts:
        line = next(self._lines)
        assert line["step"] == step, f"{self.folder}/{ROLLOUTS} has step {line['step']} in place of {step}"
        weights = Weights.of(self.setup.require_local("a replay"))
        if weights.digest != line["digest"]:
            raise EarnestError(
                f"the weights before step {step} differ from those of {self.folder}, so this is no replay bit for bit; "
                "run it with the same versions, on the same kind of machine, with the same number of threads."
            )
        assert self.stream is not None
        count = self.setup.config.sampling.prompts_per_step
        self.stream.position = int(line["batch"]) * count
        prompts = self.stream.next(count)
        attempts = [
            Attempt(prompts[rollout.prompt_index], rollout, row["text"], _GRADE.validate_python(row["grade"]))
            for row in line["rows"]
            for rollout in [_ROLLOUT.validate_python(row["rollout"])]
        ]
        drawn: dict[tuple[int, int], list[Rollout]] = {}
        for a, row in zip(attempts, line["rows"], strict=True):
            found = [_ROLLOUT.validate_python(r) for r in row.get("drawn", ())]
            key = (a.rollout.prompt_index, a.rollout.sample_index)
            drawn[key] = [r for r in found if isinstance(r, Rollout)]
        return self.collect(int(line["batch"]) + 1, prompts, Conversations(attempts, drawn))


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    with (folder / ROLLOUTS).open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def steps_recorded(folder: Path, steps: int) -> None:
    """Raise unless the folder has the rollouts of all steps."""
    if not (folder / ROLLOUTS).is_file():
        raise CheckpointError(
            f"{folder} has no {ROLLOUTS}: only runs with sampler.staleness above 0 record it. The others are repeated "
            f"by `earnest run {folder}/config.yaml`."
        )
    found = sum(1 for _ in _lines(folder))
    if found != steps:
        raise CheckpointError(
            f"{folder} has the rollouts of {found} of its {steps} steps; finish it first: earnest run {folder} --resume"
        )
