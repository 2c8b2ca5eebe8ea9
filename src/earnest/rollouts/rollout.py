"""``Rollout``: one sampled completion, a conversation of one turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from earnest.rollouts.trajectory import Segment, Segments


@dataclass(frozen=True)
class Rollout:
    """A completion, the exact log-probs that it was sampled with, and the version of the weights that sampled it."""

    prompt_index: int
    sample_index: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]
    policy_version: int
    temperature: float

    @property
    def rows(self) -> tuple[Segments, ...]:
        """The completion as the only row of a conversation."""
        sampled = Segment(self.tokens, "policy", self.logprobs, self.policy_version)
        return ((Segment(self.prompt, "template"), sampled),)
