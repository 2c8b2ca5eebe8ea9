"""The dose of a vector, in nats instead of multiples of its length.

    c* : p95 over tokens of KL(π_c ‖ π) = target          by bisection; π_c is the policy with c·v in its stream

The tokens are given completions (usually the policy's own), so every c is measured on the same positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.engines.vocabulary import scalars
from earnest.models.policy import Policy
from earnest.objectives.needs import Divergence, LogProb
from earnest.objectives.trust import aggregate
from earnest.signals.batch import Batch, Reference
from earnest.signals.distributions import Hidden
from earnest.steering.errors import SteeringError
from earnest.steering.vectors import Vector

REVERSE = Divergence("reference", alpha=1.0)


@dataclass(frozen=True)
class Dose:
    """``coefficient`` gives ``kl`` nats; ``tried`` are all pairs of both, in the order of the search."""

    coefficient: float
    kl: float
    target: float
    tried: tuple[tuple[float, float], ...]


@torch.no_grad()
def states(policy: Policy, batch: Batch) -> Float[Tensor, "N d"]:
    """Last hidden states before the batch's active tokens, of the current policy."""
    return policy.hidden(batch.inputs)[batch.row, batch.position]


@torch.no_grad()
def logprobs(policy: Policy, batch: Batch) -> Float[Tensor, " N"]:
    """Log-probs of the batch's active tokens under the current policy."""
    batch = batch.to(policy.device)
    return scalars(states(policy, batch), policy.head, batch, [LogProb()])[LogProb()].values


@torch.no_grad()
def token_kl(policy: Policy, batch: Batch, base: Float[Tensor, "N d"]) -> Float[Tensor, " N"]:
    """KL(π‖π₀) at every active token: the current policy against ``base``, an earlier result of ``states``."""
    held = batch.with_signals(reference=Reference(distribution=Hidden(base)))
    return scalars(states(policy, batch), policy.head, held, [REVERSE])[REVERSE].values


def calibrate_dose(
    policy: Policy,
    vector: Vector,
    batch: Batch,
    target: float,
    *,
    base: Float[Tensor, "N d"] | None = None,
    over: str = "p95",
    tolerance: float = 0.05,
) -> Dose:
    """The coefficient at which the vector moves the policy by ``target`` nats: the 95th percentile over tokens.

    base: states of the policy to measure from; None: this policy without the vector.
    tolerance: the allowed relative error.
    """
    batch = batch.to(policy.device)
    home = states(policy, batch) if base is None else base

    def strength(coefficient: float) -> float:
        with vector.applied(policy, coefficient):
            return float(aggregate(token_kl(policy, batch, home), over))

    return bisect(strength, target, tolerance)


def bisect(strength: Callable[[float], float], target: float, tolerance: float = 0.02) -> Dose:
    """A coefficient c > 0 with strength(c) ≈ target: doubled until strength(c) exceeds the target, then bisected. The
    strength need not be monotone: the ends always lie on both sides of the target, so a crossing is found."""
    if not target > 0:
        raise SteeringError(f"the target is {target} nats; give a number above 0.")
    tried: list[tuple[float, float]] = []

    def look(coefficient: float) -> float:
        found = strength(coefficient)
        tried.append((coefficient, found))
        return found

    low, high = 0.0, 1.0
    if look(0.0) >= target:
        raise SteeringError(
            f"without the vector the policy is {tried[-1][1]:.3g} nats from the base, the target is {target:g}; "
            "raise the target, or measure from the unsteered policy."
        )
    while look(high) < target:
        low, high = high, 2 * high
        if high > 2**12:
            raise SteeringError(
                f"at {low:g} times the vector the policy moves by {tried[-1][1]:.3g} nats, the target is {target:g}: "
                "the vector has almost no effect; use other layers or more contexts."
            )
    while abs(tried[-1][1] - target) > tolerance * target and high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if look(middle) < target else (low, middle)
    return Dose(*tried[-1], target, tuple(tried))
