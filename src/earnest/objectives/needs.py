"""The per-token scalars that an objective can request from an engine. Terms with equal needs share the result.

The engine returns one number per active token for each need (for a teacher: per covered token) and receives the loss's
derivative by each number. Objectives do not see logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DistributionSource = Literal["teacher", "reference"]
Support = Literal["full", "student", "teacher"]
Tail = Literal["bucket", "renormalise", "unnormalised"]


@dataclass(frozen=True)
class LogProb:
    """log softmax(z/temperature)[target], in nats. Shape [N], or [N, K] for K targets per position."""

    temperature: float = 1.0


@dataclass(frozen=True)
class Entropy:
    """-Σ p log p of softmax(z/temperature). Shape [N]."""

    temperature: float = 1.0


@dataclass(frozen=True)
class Divergence:
    """GJS_α between the student S and a source T, per token: α·KL(T‖M) + (1-α)·KL(S‖M), M = (1-α)S + αT.

    α = 0 is KL(T‖S) (forward), α = 1 is KL(S‖T) (reverse). ``normalised`` divides by α(1-α), which makes the family
    continuous. ``support`` selects the K tokens that are compared, ``tail`` how the others count; ``blend`` = t
    replaces T by softmax((1-t)·sg[z_S] + t·z_T) (TAID).
    """

    source: DistributionSource
    alpha: float = 0.5
    normalised: bool = False
    support: Support = "full"
    top_k: int | None = None
    tail: Tail = "bucket"
    temperature: float = 1.0
    blend: float | None = None


@dataclass(frozen=True)
class SourceEntropy:
    """Entropy of a source's own distribution; it has no gradient. Shape [M]."""

    source: DistributionSource
    temperature: float = 1.0


@dataclass(frozen=True)
class SpectralNorm:
    """σ_max(ΔW) of every adapted module. Shape [L], one number per module; not a per-token scalar."""


Need = LogProb | Entropy | Divergence | SourceEntropy | SpectralNorm
