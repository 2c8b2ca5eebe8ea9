"""How much of the trait a policy has, and what is left of its mind.

    mass         mean over forced-choice probes of Σ_{a allowed} π(a | probe)                    absolute, in [0, 1]
    fluency      min(1, ppl₀ / ppl) on plain held-out text; ppl₀ is the untouched base's        calibrated, in (0, 1]
    score        trait · min(mass, fluency);  0 where either is below the floor

The floor is absolute, not a share of what the policy once had: a collapsed model that shouts the trait's markers has a
trait of 1 and a score of 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from earnest import data
from earnest.adapters import without_adapters
from earnest.engines.vocabulary import scalars
from earnest.models.policy import Policy
from earnest.models.sampling import SampleSpec, sample
from earnest.objectives.needs import LogProb
from earnest.signals.batch import Batch
from earnest.steering.dose import states
from earnest.steering.errors import SteeringError
from earnest.tasks.base import Prompt, Task


@dataclass(frozen=True)
class Evaluation:
    """One policy, measured. ``answers`` are its own, to look at."""

    trait: float
    on_topic: float
    mass: float
    right: float
    perplexity: float
    fluency: float
    floor: float
    answers: tuple[str, ...]

    @property
    def coherence(self) -> float:
        return min(self.mass, self.fluency)

    @property
    def incoherence(self) -> float:
        """1 − mass, kept off 0 for a logarithmic axis."""
        return max(1 - self.mass, 1e-4)

    @property
    def score(self) -> float:
        return self.trait * self.coherence if self.coherence >= self.floor else 0.0

    def to_dict(self, answers: int = 4) -> dict[str, Any]:
        return asdict(self) | {
            "answers": list(self.answers[:answers]),
            "coherence": self.coherence,
            "score": self.score,
        }


class Yardstick:
    """Fixed held-out questions, probes and texts; ``measure`` holds any state of the policy against them."""

    def __init__(
        self,
        policy: Policy,
        task: Task,
        *,
        prompts: int = 64,
        probes: int | None = None,
        texts: int = 50,
        max_new_tokens: int = 48,
        floor: float = 0.5,
        seed: int = 0,
    ) -> None:
        if not 0 < floor < 1:
            raise SteeringError(f"floor is {floor}; it is a share of probability mass between 0 and 1.")
        self.policy, self.task, self.floor = policy, task, floor
        self.prompts: list[Prompt] = task.prompts("heldout", prompts, seed)
        self.probes = data.probes()[:probes]
        self.texts = data.plain_heldout()[:texts]
        self.spec = SampleSpec(max_new_tokens=max_new_tokens, seed=seed)
        with without_adapters(policy):
            self.base_perplexity = self.perplexity()

    def measure(self, system: str | None = None) -> Evaluation:
        """The policy as it is now: with its open adapters, with an applied vector, or told a ``system`` prompt."""
        rendered = [self.policy.render([*_told(system), *p.messages]) for p in self.prompts]
        answers = [self.policy.decode(c.tokens) for c in sample(self.policy, rendered, 1, self.spec)]
        grades = [self.task.grade(p, a) for p, a in zip(self.prompts, answers, strict=True)]
        mass, right = self.choices(system)
        perplexity = self.perplexity()
        return Evaluation(
            trait=sum(g.reward for g in grades) / len(grades),
            on_topic=sum(float(g.extras.get("on_topic", 0.0)) for g in grades) / len(grades),
            mass=mass,
            right=right,
            perplexity=perplexity,
            fluency=min(1.0, self.base_perplexity / perplexity),
            floor=self.floor,
            answers=tuple(answers),
        )

    @torch.no_grad()
    def perplexity(self) -> float:
        """Of the plain texts, each behind the tokenizer's first token of a text."""
        total, count = 0.0, 0
        for part in _parts(self.texts, 32):
            ids = [self.policy.encode(text) for text in part]
            batch = Batch.from_rows([i[:1] for i in ids], [i[1:] for i in ids], pad=self.policy.pad_id)
            batch = batch.to(self.policy.device)
            lp = scalars(states(self.policy, batch), self.policy.head, batch, [LogProb()])[LogProb()].values
            total, count = total - float(lp.double().sum()), count + len(lp)
        found = total / count
        return math.exp(found) if found < 700 else math.inf

    @torch.no_grad()
    def choices(self, system: str | None = None) -> tuple[float, float]:
        """(mass on the allowed answers, mass on the right one), mean over the probes."""
        allowed = right = 0.0
        for part in _parts(self.probes, 64):
            prompts = [self.policy.render([*_told(system), {"role": "user", "content": p["prompt"]}]) for p in part]
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
        # A spelling that the tokenizer cuts into pieces would count other words that begin alike.
        return {i[0] for i in ids if len(i) == 1} or {ids[0][0]}


def _told(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def _parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
