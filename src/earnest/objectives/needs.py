"""The per-token scalars that an objective may ask an engine for. A need is a value: two terms that ask for the same share it.

The engine answers each need with one number an active token (or a covered one, for a teacher that covers some of them), and
takes back the loss's derivative by each number. No objective sees a logit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LogProb:
    """log softmax(z/temperature)[target], in nats. Shape [N], or [N, K] for K targets a position."""

    temperature: float = 1.0


@dataclass(frozen=True)
class Entropy:
    """-Σ p log p of softmax(z/temperature). Shape [N]."""

    temperature: float = 1.0


Source = Literal["teacher", "reference"]
Need = LogProb | Entropy
