"""The batches of a run: the prompts, seeds and pairs of each step. ``rollouts`` makes the batch from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from earnest.models import SampleSpec
from earnest.rollouts import Attempt, Rollouts, collect
from earnest.rollouts import attempt as graded
from earnest.runs.setup import Setup
from earnest.seeds import derive
from earnest.tasks import Prompt, PromptStream


def attempt(setup: Setup, prompts: Sequence[Prompt], n: int, seed: int) -> list[Attempt]:
    """``n`` graded completions of every prompt, prompt by prompt, with the run's sampler and settings."""
    spec = _spec(setup, seed)
    return graded(setup.sample, setup.policy, setup.task, prompts, n, spec, setup.config.max_grader_errors)


class BatchSource:
    """The batch of each step. Its order depends on the seed and ``purpose``, so the check does not change training."""

    def __init__(self, setup: Setup, purpose: str = "train", position: int = 0) -> None:
        self.setup, self.purpose = setup, purpose
        self.stream = PromptStream(setup.task, derive(setup.config.seed, purpose) % 2**31, position=position)

    def next(self, step: int) -> Rollouts:
        """The batch of ``step``, with every signal that the objective reads."""
        setup, config = self.setup, self.setup.config
        count = config.sampling.prompts_per_step
        file = setup.preferences
        found = collect(
            setup.engine,
            setup.task,
            self.stream.next(count),
            config.sampling.completions_per_prompt,
            _spec(setup, derive(config.seed, f"{self.purpose} sampling", step)),
            objective=setup.objective,
            estimator=config.advantages,
            teacher=setup.teacher,
            pairs=None if file is None else file.at(config.seed, self.purpose, step * count, count),
            sample=setup.sample,
            max_grader_errors=config.max_grader_errors,
        )
        return found if setup.samplers is None else replace(found, metrics=found.metrics | setup.samplers.metrics)


def sample_record(a: Attempt, phase: str, step: int) -> dict[str, Any]:
    """A line of samples.jsonl."""
    return {
        "phase": phase,
        "step": step,
        "version": a.rollout.policy_version,
        "prompt_id": a.prompt.id,
        "sample": a.rollout.sample_index,
        "prompt": [dict(m) for m in a.prompt.messages],
        "completion": a.text,
        "reward": a.grade.reward,
        "correct": a.grade.correct,
        "feedback": a.grade.feedback,
        "tokens": len(a.rollout.tokens),
    }


def _spec(setup: Setup, seed: int) -> SampleSpec:
    sampling = setup.config.sampling
    return SampleSpec(max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature, seed=seed)
