"""The batches of a run: which prompts, seeds and rows of the user's file each step gets. ``collect`` does the rest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from earnest.models import SampleSpec
from earnest.rollouts import Attempt, Rollouts, collect
from earnest.rollouts import attempt as graded
from earnest.runs.own_data import HELDOUT_SEED
from earnest.runs.setup import Setup
from earnest.seeds import derive
from earnest.tasks import Prompt, PromptStream


def attempt(setup: Setup, prompts: Sequence[Prompt], n: int, seed: int) -> list[Attempt]:
    """``n`` graded completions of every prompt, prompt by prompt, with the run's sampler and settings."""
    assert setup.task is not None, "there are prompts only where there is a task"
    spec = _spec(setup, seed)
    return graded(setup.sample, setup.policy, setup.task, prompts, n, spec, setup.config.max_grader_errors)


class BatchSource:
    """The batch of each step. Its order depends on the seed and ``purpose``, so the check does not change training."""

    def __init__(self, setup: Setup, purpose: str = "train", position: int = 0) -> None:
        self.setup, self.purpose = setup, purpose
        seed = derive(setup.config.seed, purpose) % 2**31
        self.stream = None if setup.task is None else PromptStream(setup.task, seed, position=position)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the order of the prompts; the order of the user's rows needs the step only."""
        return {"position": 0} if self.stream is None else self.stream.state()

    def next(self, step: int) -> Rollouts:
        """The batch of ``step``, with every signal that the objective reads."""
        setup, config = self.setup, self.setup.config
        count = config.sampling.prompts_per_step
        found = collect(
            setup.engine,
            setup.task,
            [] if self.stream is None else self.stream.next(count),
            config.sampling.completions_per_prompt,
            _spec(setup, derive(config.seed, f"{self.purpose} sampling", step)),
            objective=setup.objective,
            estimator=config.advantages,
            teacher=setup.teacher,
            given=() if setup.data is None else setup.data.rows(config.seed, self.purpose, step, count),
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


def own_samples(setup: Setup, phase: str, step: int) -> list[dict[str, Any]]:
    """Lines of samples.jsonl: completions of held-out prompts of the user's file, with the file's own answer."""
    assert setup.data is not None, "they are samples on the user's data"
    spec, policy = _spec(setup, HELDOUT_SEED), setup.policy
    asked = [
        (example, tokens)
        for example in setup.data.heldout(setup.config.samples.heldout)
        if example.prompt
        and len(tokens := policy.render(example.prompt, tools=example.tools or None)) + spec.max_new_tokens
        <= (policy.positions or 2**31)
    ]
    if not asked:
        return []
    found = setup.sample([tokens for _, tokens in asked], 1, spec)
    return [
        {
            "phase": phase,
            "step": step,
            "version": rollout.policy_version,
            "prompt_id": f"held-out row {number}",
            "sample": 0,
            "prompt": [{"role": m["role"], "content": _plain(m.get("content"))} for m in example.prompt],
            "completion": policy.decode(rollout.tokens),
            "feedback": f"in the file: {_plain(example.reply[0].get('content'))}",
            "tokens": len(rollout.tokens),
        }
        for number, ((example, _), rollout) in enumerate(zip(asked, found, strict=True), 1)
    ]


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _spec(setup: Setup, seed: int) -> SampleSpec:
    sampling = setup.config.sampling
    return SampleSpec(max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature, seed=seed)
