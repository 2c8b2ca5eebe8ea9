"""The rows of a step: graded rollouts, demonstrations from the task's right answers, preference pairs of rollouts.

Which of them a step has is decided by the objective: by the roles that its live terms read.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from earnest.engines.base import Rollout
from earnest.errors import ConfigError
from earnest.models import Policy, SampleSpec
from earnest.models.replies import reply_tokens
from earnest.objectives import Objective
from earnest.runs.setup import Setup
from earnest.seeds import derive
from earnest.signals import ROLES, Batch, Role, pairs_of, with_advantages
from earnest.tasks import Grade, Prompt, PromptStream, Task, grade_all


@dataclass(frozen=True)
class Attempt:
    """A rollout, what it says, and its grade."""

    prompt: Prompt
    rollout: Rollout
    text: str
    grade: Grade


@dataclass(frozen=True)
class PairRow:
    """A row of a preference pair. An answer from a file was sampled by nobody here: its log-probs are 0, unread."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    correct: bool


@dataclass(frozen=True)
class Collected:
    """A step's batch, before the signals that an engine has to compute, and what there is to say about it."""

    batch: Batch
    attempts: tuple[Attempt, ...]
    metrics: dict[str, float]


def roles_of(objective: Objective) -> frozenset[Role]:
    """The roles that a step must supply: those that terms name; a term that reads any row takes what there is."""
    named = {role for w in objective.live() if w.term.roles != ROLES for role in w.term.roles}
    return frozenset(named) or frozenset({"rollout"})


def attempt(setup: Setup, prompts: Sequence[Prompt], n: int, seed: int) -> list[Attempt]:
    """``n`` graded completions of every prompt, prompt by prompt."""
    sampling = setup.config.sampling
    spec = SampleSpec(max_new_tokens=sampling.max_new_tokens, temperature=sampling.temperature, seed=seed)
    rollouts = setup.sample([setup.policy.render(p.messages) for p in prompts], n, spec)
    asked = [prompts[r.prompt_index] for r in rollouts]
    texts = [setup.policy.decode(r.tokens) for r in rollouts]
    grades = grade_all(setup.task, asked, texts, setup.config.max_grader_errors)
    return [Attempt(*parts) for parts in zip(asked, rollouts, texts, grades, strict=True)]


class Source:
    """A step's batch, in an order that the seed alone decides; ``purpose`` keeps the check out of training's order."""

    def __init__(self, setup: Setup, purpose: str = "train", position: int = 0) -> None:
        self.setup, self.purpose = setup, purpose
        self.roles = roles_of(setup.objective)
        self.stream = PromptStream(setup.task, derive(setup.config.seed, purpose) % 2**31, position=position)

    def next(self, step: int) -> Collected:
        """The batch of ``step``."""
        setup, config = self.setup, self.setup.config
        prompts = self.stream.next(config.sampling.prompts_per_step)
        attempts: list[Attempt] = []
        if self.roles & ({"rollout"} if setup.preferences else {"rollout", "chosen", "rejected"}):
            seed = derive(config.seed, f"{self.purpose} sampling", step)
            attempts = attempt(setup, prompts, config.sampling.completions_per_prompt, seed)
        shown = [demonstrate(setup.policy, setup.task, p) for p in prompts] if "demonstration" in self.roles else []
        again = self._pairs(step, attempts)  # a pair's rows: the better answer, then the worse
        pairs = len(again) // 2
        kinds: tuple[tuple[Role, ...], ...] = (("rollout",), ("demonstration",), ("chosen", "rejected"))
        sizes = (len(attempts), len(shown), pairs)
        roles = [role for kind, size in zip(kinds, sizes, strict=True) for role in kind * size]
        # A demonstration was sampled by nobody: its behaviour is filled with 0, which no term reads.
        behaviour = [list(a.rollout.logprobs) for a in attempts] + [[0.0] * len(answer) for _, answer in shown]
        behaviour += [list(row.logprobs) for row in again]
        others = len(shown) + len(again)
        batch = Batch.from_rows(
            [a.rollout.prompt for a in attempts] + [tuple(p) for p, _ in shown] + [row.prompt for row in again],
            [a.rollout.tokens for a in attempts] + [tuple(x) for _, x in shown] + [row.tokens for row in again],
            role=roles,
            group=[a.rollout.prompt_index for a in attempts] + list(range(len(prompts), len(prompts) + others)),
            pair=[-1] * (len(attempts) + len(shown)) + [p for p in range(pairs) for _ in range(2)],
            policy_version=[a.rollout.policy_version for a in attempts] + [setup.engine.version] * others,
            behaviour=behaviour if attempts else None,
            correct=[a.grade.correct for a in attempts] + [True] * len(shown) + [row.correct for row in again],
            temperature=config.sampling.temperature if attempts or not setup.preferences else 1.0,
            max_length=config.sampling.max_new_tokens,
            pad=setup.policy.pad_id,
            device=setup.policy.device,
        ).with_signals(sought=tuple(sorted(self.roles)))
        metrics = describe(attempts) | (dict(setup.samplers.metrics) if setup.samplers is not None else {})
        if attempts:
            batch = with_advantages(batch, [a.grade.reward for a in attempts], config.advantages)
        return Collected(batch, tuple(attempts), metrics)

    def _pairs(self, step: int, attempts: Sequence[Attempt]) -> list[PairRow]:
        """Chosen and rejected rows in turn: from the file of pairs where the run has one, else among the rollouts."""
        setup, config = self.setup, self.setup.config
        if not self.roles & {"chosen", "rejected"}:
            return []
        if setup.preferences is None:
            ranked = [attempts[i] for couple in prefer(attempts) for i in couple]
            return [PairRow(a.rollout.prompt, a.rollout.tokens, a.rollout.logprobs, a.grade.correct) for a in ranked]
        count = config.sampling.prompts_per_step
        found = setup.preferences.at(config.seed, self.purpose, step * count, count)
        rows = [(t.prompt, answer, i == 0) for t in found for i, answer in enumerate((t.chosen, t.rejected))]
        return [PairRow(prompt, answer, (0.0,) * len(answer), better) for prompt, answer, better in rows]


def prefer(attempts: Sequence[Attempt]) -> list[tuple[int, int]]:
    """Preference pairs among the completions of each prompt: the best answer over the worst, where they differ."""
    return pairs_of([a.grade.reward for a in attempts], [a.rollout.prompt_index for a in attempts])


def demonstrate(policy: Policy, task: Task, prompt: Prompt) -> tuple[list[int], list[int]]:
    """(prompt, right answer) in tokens; the answer ends its turn. One that its own grader refuses is not taught."""
    answer = prompt.data.get("answer")
    if answer is None:
        raise ConfigError(
            f"task: {task.name} has no right answers to demonstrate (its prompts carry no data['answer']); "
            "take a task that has, or an objective on rollouts."
        )
    if not task.grade(prompt, str(answer)).correct:
        raise ConfigError(
            f"task: the grader of {task.name} refuses its own answer {answer!r} to prompt {prompt.id}; mend the task."
        )
    return reply_tokens(policy, prompt.messages, str(answer))


def describe(attempts: Sequence[Attempt]) -> dict[str, float]:
    """What is worth a curve besides the reward: lengths, groups without a difference, the graders' own numbers."""
    if not attempts:
        return {}
    rewards: dict[int, set[float]] = defaultdict(set)
    for a in attempts:
        rewards[a.rollout.prompt_index].add(a.grade.reward)
    metrics = {
        "correct": _mean([a.grade.correct for a in attempts]),
        "completion_tokens": _mean([len(a.rollout.tokens) for a in attempts]),
        "cut_off": _mean([a.rollout.finish == "length" for a in attempts]),
        "zero_variance_groups": float(sum(len(r) == 1 for r in rewards.values())),
        "grader_errors": float(sum("error" in a.grade.extras for a in attempts)),
    }
    extras: dict[str, list[float]] = defaultdict(list)
    for a in attempts:
        for name, value in a.grade.extras.items():
            if isinstance(value, (bool, int, float)):
                extras[name].append(float(value))
    return metrics | {f"grade/{name}": _mean(values) for name, values in sorted(extras.items()) if name not in metrics}


def reward_summary(attempts: Sequence[Attempt]) -> dict[str, Any]:
    rewards = [a.grade.reward for a in attempts]
    mean = _mean(rewards)
    return {"mean": mean, "sd": math.sqrt(_mean([(r - mean) ** 2 for r in rewards])), "n": len(rewards)}


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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
