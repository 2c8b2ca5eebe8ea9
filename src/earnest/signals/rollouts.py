"""From a task to a batch: sample, grade, turn rewards into advantages.

prompts ─► n completions each ─► reward and feedback per rollout ─► A ─► Batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from earnest.signals.advantages import with_advantages
from earnest.signals.batch import Batch
from earnest.tasks import Grade, Prompt, Task, grade_all

if TYPE_CHECKING:
    from earnest.engines import LocalEngine, Rollout
    from earnest.models import SampleSpec


@dataclass(frozen=True)
class Rollouts:
    """A batch of rollouts with behaviour log-probs and advantages, and what each of its rows says and earned."""

    batch: Batch
    prompts: tuple[Prompt, ...]
    texts: tuple[str, ...]
    grades: tuple[Grade, ...]

    @property
    def reward(self) -> float:
        return sum(g.reward for g in self.grades) / len(self.grades)


def batch_of(rollouts: Sequence[Rollout]) -> Batch:
    """The rollouts' tokens, groups, exact behaviour log-probs and policy versions; no advantages yet."""
    return Batch.from_rows(
        [r.prompt for r in rollouts],
        [r.tokens for r in rollouts],
        group=[r.prompt_index for r in rollouts],
        behaviour=[r.logprobs for r in rollouts],
        policy_version=[r.policy_version for r in rollouts],
        temperature=rollouts[0].temperature,
    )


def collect(
    engine: LocalEngine, task: Task, prompts: Sequence[Prompt], n: int, spec: SampleSpec | None = None
) -> Rollouts:
    """``n`` graded completions of every prompt, as a batch that any objective on rollouts can read."""
    from earnest.models import SampleSpec

    policy = engine.policy
    rollouts = engine.sample([policy.render(p.messages) for p in prompts], n, spec or SampleSpec())
    asked = [prompts[r.prompt_index] for r in rollouts]
    texts = [policy.decode(r.tokens) for r in rollouts]
    grades = grade_all(task, asked, texts)
    batch = with_advantages(batch_of(rollouts), [g.reward for g in grades])
    return Rollouts(batch, tuple(asked), tuple(texts), tuple(grades))
