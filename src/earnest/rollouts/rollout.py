"""``Rollout``: one sampled completion, a conversation of one turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
