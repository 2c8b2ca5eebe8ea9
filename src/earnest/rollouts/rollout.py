"""``Rollout``: one sampled completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
