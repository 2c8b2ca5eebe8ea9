"""The trait of a policy, and its coherence.

    mass       mean over forced-choice probes of Σ_{a allowed} π(a | probe)                          absolute, in [0, 1]
    fluency    min(1, ppl of the base / ppl of the policy) on plain held-out text                  calibrated, in (0, 1]
    sense      min(1, ppl₀ of the base's answers / ppl₀ of the policy's), both under the base; times the share of
               answers that do not loop, because a loop has a low perplexity                       calibrated, in [0, 1]
    coherence  the least of the three;   score = trait · coherence, and 0 below the floor

The three measures complement each other: a policy can answer probes and predict plain text while its own answers are
nonsense. The floor is absolute, not relative to the base: a collapsed model that repeats the trait's markers has a
trait of 1 and a score of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from earnest import data
from earnest.adapters import without_adapters
from earnest.models.policy import Policy
from earnest.models.sampling import SampleSpec
from earnest.models.slots import sample
from earnest.signals.batch import Batch
from earnest.steering.dose import logprobs, states
from earnest.steering.errors import SteeringError
from earnest.steering.filter import Filter
from earnest.steering.text import char_repetition, word_repetition
from earnest.tasks.base import Prompt, Task

Within = AbstractContextManager[Any]
LIMITS = Filter()
"""Loops are defined as in the filter."""


@dataclass(frozen=True)
class TraitEvaluation:
    """The measurements of one policy, with its ``answers``."""

    trait: float
    on_topic: float
    mass: float
    right: float
    perplexity: float
    fluency: float
    sense: float
    floor: float
    answers: tuple[str, ...]

    @property
    def coherence(self) -> float:
        return min(self.mass, self.fluency, self.sense)

    @property
    def score(self) -> float:
        return self.trait * self.coherence if self.coherence >= self.floor else 0.0

    def to_dict(self, answers: int = 4) -> dict[str, Any]:
        return asdict(self) | {
            "answers": list(self.answers[:answers]),
            "coherence": self.coherence,
            "score": self.score,
        }


class TraitEvaluator:
    """Fixed held-out questions, probes and texts; ``measure`` evaluates the current policy on them."""

    def __init__(
        self,
        policy: Policy,
        task: Task,
        *,
        prompts: int = 64,
        probes: int | None = None,
        texts: int = 50,
        max_new_tokens: int = 48,
        temperature: float = 1.0,
        floor: float = 0.5,
        seed: int = 0,
    ) -> None:
        if not 0 < floor < 1:
            raise SteeringError(f"floor is {floor}; it is a share of probability mass between 0 and 1.")
        self.policy, self.task, self.floor = policy, task, floor
        self.prompts: list[Prompt] = task.prompts("heldout", prompts, seed)
        self.probes = data.probes()[:probes]
        self.texts = data.plain_heldout()[:texts]
        self.spec = SampleSpec(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        with without_adapters(policy):
            self.base_perplexity = self.perplexity()
            self.base_answers = self._answer_perplexity(self._answers())

    def measure(self, system: str | None = None, *, within: Callable[[], Within] = nullcontext) -> TraitEvaluation:
        """Evaluate the current policy with its active adapters, and with a ``system`` prompt if one is given. within:
        makes the block in which the policy answers, such as ``lambda: vector.applied(policy, dose)``. The base scores
        the answers outside of it, so do not call this method inside such a block."""
        with within():
            tokens = self._answers(system)
            mass, right = self.choices(system)
            perplexity = self.perplexity()
        answers = [self.policy.decode(t) for t in tokens]
        grades = [self.task.grade(p, a) for p, a in zip(self.prompts, answers, strict=True)]
        return TraitEvaluation(
            trait=sum(g.reward for g in grades) / len(grades),
            on_topic=sum(float(g.extras.get("on_topic", 0.0)) for g in grades) / len(grades),
            mass=mass,
            right=right,
            perplexity=perplexity,
            fluency=min(1.0, self.base_perplexity / perplexity),
            sense=self._sense(tokens, answers),
            floor=self.floor,
            answers=tuple(answers),
        )

    def _answers(self, system: str | None = None) -> list[tuple[int, ...]]:
        rendered = [self.policy.render([*_system_message(system), *p.messages]) for p in self.prompts]
        return [c.tokens for c in sample(self.policy, rendered, 1, self.spec)]

    def _sense(self, tokens: Sequence[tuple[int, ...]], answers: Sequence[str]) -> float:
        looping = sum(
            word_repetition(a) > LIMITS.word_repetition or char_repetition(a) > LIMITS.char_repetition for a in answers
        )
        return (1 - looping / len(answers)) * min(1.0, self.base_answers / self._answer_perplexity(tokens))

    def _answer_perplexity(self, tokens: Sequence[tuple[int, ...]]) -> float:
        """The perplexity of answers to the questions without a system prompt, under the base without adapters."""
        prompts = [self.policy.render(p.messages) for p in self.prompts]
        with without_adapters(self.policy):
            return self._perplexity(list(zip(prompts, tokens, strict=True)))

    def perplexity(self) -> float:
        """The perplexity of the plain texts, each after the tokenizer's first token of a text."""
        return self._perplexity([(i[:1], i[1:]) for i in map(self.policy.encode, self.texts)])

    def _perplexity(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> float:
        total, count = 0.0, 0
        for part in _parts(rows, 32):
            lp = logprobs(
                self.policy, Batch.from_rows([p for p, _ in part], [t for _, t in part], pad=self.policy.pad_id)
            )
            total, count = total - float(lp.double().sum()), count + len(lp)
        return _exp(total / count)

    @torch.no_grad()
    def choices(self, system: str | None = None) -> tuple[float, float]:
        """(mass on the allowed answers, mass on the right one), mean over the probes."""
        allowed = right = 0.0
        for part in _parts(self.probes, 64):
            prompts = [
                self.policy.render([*_system_message(system), {"role": "user", "content": p["prompt"]}]) for p in part
            ]
            batch = Batch.from_rows(prompts, [[self.policy.pad_id]] * len(part), pad=self.policy.pad_id)
            batch = batch.to(self.policy.device)
            chances = self.policy.head.logits(states(self.policy, batch)).float().softmax(-1)
            for row, probe in zip(chances, part, strict=True):
                tokens = {answer: self._first_tokens(answer) for answer in probe["allowed"]}
                allowed += float(row[sorted(set().union(*tokens.values()))].sum())
                right += float(row[sorted(tokens[probe["answer"]])].sum())
        return allowed / len(self.probes), right / len(self.probes)

    def _first_tokens(self, answer: str) -> set[int]:
        """The tokens that an answer may begin with: as written or capitalised."""
        spellings = {answer, answer.capitalize()}
        encode = self.policy.tokenizer.encode
        ids = [encode(text, add_special_tokens=False) for text in spellings]
        # A spelling of several tokens is left out: its first token also begins other words.
        return {i[0] for i in ids if len(i) == 1} or {ids[0][0]}


def _system_message(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf
