"""``Rollout``: one sampled completion, a conversation of one turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from earnest.models.sampling import Completion, SampleSpec
from earnest.rollouts.trajectory import Segment, Segments


@dataclass(frozen=True)
class Rollout:
    """A completion, the exact log-probs that it was sampled with, and the version of the weights that sampled it.

    ``continued``: (number of tokens, version) of each span, where new weights arrived while it was sampled; then
    ``policy_version`` is the first and oldest.
    """

    prompt_index: int
    sample_index: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]
    policy_version: int
    temperature: float
    continued: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, found: Completion, place: int, prompt: Sequence[int], version: int, spec: SampleSpec) -> Rollout:
        """The completion ``found`` of prompt number ``place``, as weights of this version sampled it."""
        ends = (found.tokens, found.logprobs, found.finish)
        return cls(place, found.sample_index, tuple(prompt), *ends, version, spec.temperature or 1.0)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """(number of tokens, version that sampled them), from the first token to the last."""
        return self.continued or ((len(self.tokens), self.policy_version),)

    @property
    def rows(self) -> tuple[Segments, ...]:
        """The completion as the only row of a conversation."""
        sampled, begin = [], 0
        for length, version in self.spans:
            part = slice(begin, begin + length)
            sampled.append(Segment(self.tokens[part], "policy", self.logprobs[part], version))
            begin += length
        return ((Segment(self.prompt, "template"), *sampled),)
