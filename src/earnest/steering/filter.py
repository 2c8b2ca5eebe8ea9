"""The filter that selects steered samples for training, and a test of whether it separates good from broken.

tail perplexity   exp(mean −log π₀(y_t)) over the last half of the answer, under the base: a steered answer decays
                  towards its end, which a mean over the whole answer hides
repetition        of words and of characters: a loop has a *low* perplexity, so perplexity alone lets it pass
phrases           narration (talks about answering) and refusal
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.adapters import without_adapters
from earnest.errors import EarnestError
from earnest.models.policy import Policy
from earnest.settings import Checked, setting
from earnest.signals.batch import Batch
from earnest.steering.dose import logprobs
from earnest.steering.errors import SteeringError
from earnest.steering.text import NARRATION, REFUSAL, char_repetition, says, word_repetition

TAIL_TOKENS = 4
"""The smallest number of tokens in a tail; a shorter answer is all tail."""


@dataclass(frozen=True)
class SteeredSample:
    """A prompt, an answer to it, and the perplexity of the answer's tail under the base."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str
    tail_perplexity: float


@torch.no_grad()
def read(
    policy: Policy, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, rows: int = 64
) -> list[SteeredSample]:
    """The answers with their tail perplexity under the base: no adapter, no vector (call it outside ``applied``)."""
    found: list[SteeredSample] = []
    for start in range(0, len(prompts), rows):
        part = slice(start, start + rows)
        batch = Batch.from_rows(prompts[part], answers[part], pad=policy.pad_id).to(policy.device)
        with without_adapters(policy):
            lp = logprobs(policy, batch)
        for r, (prompt, answer) in enumerate(zip(prompts[part], answers[part], strict=True)):
            tail = tail_perplexity(lp[batch.row == r])
            found.append(SteeredSample(tuple(prompt), tuple(answer), policy.decode(answer), tail))
    return found


def tail_perplexity(logprobs: Float[Tensor, " n"]) -> float:
    """Perplexity of the last half."""
    size = max(math.ceil(len(logprobs) / 2), min(TAIL_TOKENS, len(logprobs)))
    return float(logprobs[-size:].double().mean().neg().exp())


@dataclass(frozen=True, kw_only=True)
class Filter(Checked):
    """Limits; a sample that passes every one survives. ``tail_perplexity`` None: set it with ``calibrated`` first."""

    error: ClassVar[type[EarnestError]] = SteeringError

    tail_perplexity: float | None = setting(
        None,
        "the largest perplexity of an answer's last half under the base; none: calibrated on good answers",
        above=1.0,
    )
    word_repetition: float = setting(0.3, "the largest share of repeated word trigrams", at_least=0.0, at_most=1.0)
    char_repetition: float = setting(
        0.3, "the largest share of characters in one repeating stretch", at_least=0.0, at_most=1.0
    )
    narration: tuple[str, ...] = setting(NARRATION, "phrases that are refused: the answer talks about answering")
    refusal: tuple[str, ...] = setting(REFUSAL, "phrases that are refused: the answer declines the request")

    def reasons(self, sample: SteeredSample) -> list[str]:
        """The reasons to refuse the sample; empty if it survives."""
        if self.tail_perplexity is None:
            raise SteeringError("the filter has no limit for the tail perplexity; give one, or use calibrated(good).")
        refused = {
            "empty": not sample.text.strip(),
            "tail perplexity": not sample.tail_perplexity <= self.tail_perplexity,
            "word repetition": word_repetition(sample.text) > self.word_repetition,
            "character repetition": char_repetition(sample.text) > self.char_repetition,
            "narration": says(sample.text, self.narration),
            "refusal": says(sample.text, self.refusal),
        }
        return [reason for reason, found in refused.items() if found]

    def survivors(self, samples: Sequence[SteeredSample]) -> list[SteeredSample]:
        return [s for s in samples if not self.reasons(s)]

    def counts(self, samples: Sequence[SteeredSample]) -> dict[str, int]:
        """The number of samples that each reason refuses (one sample may have several reasons)."""
        return dict(Counter(reason for s in samples for reason in self.reasons(s)))

    def calibrated(self, good: Sequence[SteeredSample], share: float = 0.95, margin: float = 1.5) -> Self:
        """This filter with the perplexity limit at ``margin`` × the ``share`` quantile of known good answers."""
        if not good:
            raise SteeringError("there is no good sample to calibrate the filter on; give at least one.")
        values = torch.tensor([s.tail_perplexity for s in good], dtype=torch.float64)
        return replace(self, tail_perplexity=margin * float(values.quantile(share)))


@dataclass(frozen=True)
class Separation:
    """The shares of known good and of known broken answers that pass the filter. ``auc``: the probability that a broken
    answer has a higher tail perplexity than a good one. ``separates``: the share of good answers that pass is larger by
    at least one half."""

    good: float
    broken: float
    auc: float
    reasons: dict[str, int]

    @property
    def separates(self) -> bool:
        return self.good - self.broken >= 0.5

    def __str__(self) -> str:
        verdict = "separates" if self.separates else "does NOT separate"
        return (
            f"the filter {verdict}: it passes {self.good:.0%} of the good answers and {self.broken:.0%} of the broken "
            f"ones (tail perplexity alone: AUC {self.auc:.2f})"
        )


def separation(limits: Filter, good: Sequence[SteeredSample], broken: Sequence[SteeredSample]) -> Separation:
    """Apply a filter to known good and known broken answers."""
    if not good or not broken:
        raise SteeringError(f"the report needs both kinds, got {len(good)} good and {len(broken)} broken answers.")
    pairs = [(b.tail_perplexity > g.tail_perplexity) + 0.5 * (b.tail_perplexity == g.tail_perplexity)
             for g in good for b in broken]  # fmt: skip
    return Separation(
        len(limits.survivors(good)) / len(good),
        len(limits.survivors(broken)) / len(broken),
        sum(pairs) / len(pairs),
        limits.counts(broken),
    )
