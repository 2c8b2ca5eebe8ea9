"""The probe: a sampler's log-probs of fixed tokens, against the trainer's own.

    off    = mean_t |lp_sampler(t) - lp_trainer(t)|  ≤ tolerance
    worst  = max_t  |lp_sampler(t) - lp_trainer(t)|  ≤ 10 · tolerance, in 32 and 64 bits
    stale  : the sampler has the weights of before and not these, where the two differ measurably

A sampler with other base weights, a stale or damaged adapter, or another precision is found before its first rollout.
The second condition finds a single wrong row of an embedding or output matrix, the third a lost push whose update moved
the probe by less than the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.errors import SamplingError
from earnest.sync.base import Sampler, Weights

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
COARSE = 0.1
"""Nats per token in 16 bits, where products of other shapes round differently."""
APART = 4.0
"""Two sets of weights differ measurably where the probe moved by this multiple of the rounding seen so far."""
WORST = 10.0
"""The largest difference at one token, as a multiple of the tolerance of the mean."""
Logprobs = Float[Tensor, " N"]


@dataclass(frozen=True, eq=False)
class Target:
    """What a sampler must hold: the weights, the trainer's log-probs of the probe with them, and with the base."""

    weights: Weights
    rows: list[list[int]]
    own: Logprobs
    base: Logprobs

    @property
    def tolerance(self) -> float:
        return tolerance(self.weights.policy.dtype)


class Link:
    """One sampler, and the weights that the trainer pushed to it."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.forget()

    def forget(self) -> None:
        """Forget the pushed weights: its process is new."""
        self.held: str | None = None
        self.before: Logprobs | None = None  # the trainer's probe under the last weights that passed the probe
        self.noise = 1e-6
        self.off = self.worst = self.moved = 0.0

    def sync(self, target: Target) -> bool:
        """Push the target's weights where the sampler has others, and probe them; False: it has them already."""
        if self.held == target.weights.digest:
            return False
        self.held = None
        self.sampler.push(target.weights)
        self._probe(target)
        self.held = target.weights.digest
        return True

    def _probe(self, target: Target) -> None:
        before = target.base if self.before is None else self.before
        theirs = torch.tensor(self.sampler.score(target.rows), dtype=torch.float64)
        off, moved, old = apart(theirs, target.own), apart(target.own, before), apart(theirs, before)
        distinct = moved > APART * self.noise
        version, place = target.weights.version, self.sampler.place
        if distinct and old < off and old <= target.tolerance:
            base = " (the base model: no adapter is applied)" if torch.equal(before, target.base) else ""
            raise SamplingError(
                f"{place} still runs old weights: after the push of version {version} its log-probs of the probe are "
                f"{off:.3g} nats per token from that version and {old:.3g} from the one before{base}. It accepted the "
                "push and did not apply it; look at its log, and remove caches between it and the trainer."
            )
        worst = float((theirs - target.own).abs().max())
        exact = target.weights.policy.dtype in TOLERANCE
        if not off <= target.tolerance or (exact and not worst <= WORST * target.tolerance):
            dtype = str(target.weights.policy.dtype).removeprefix("torch.")
            raise SamplingError(
                f"{place} is {off:.3g} nats per token off the trainer on the probe of version {version} (allowed: "
                f"{target.tolerance:g}), and {worst:.3g} at one token; it runs other weights. Does it run "
                f"{target.weights.policy.name}, in {dtype}?"
            )
        self.noise = max(self.noise, off)
        if distinct or self.before is None:
            self.before = target.own if distinct else before
        self.off, self.worst, self.moved = off, worst, moved


def tolerance(dtype: torch.dtype) -> float:
    """Nats per token that a sampler may be off, by the policy's precision."""
    return TOLERANCE.get(dtype, COARSE)


def apart(a: Logprobs, b: Logprobs) -> float:
    """Nats per token: a mean, since in 16 bits single improbable tokens round far. NaN where either has one."""
    return float((a - b).abs().mean())
