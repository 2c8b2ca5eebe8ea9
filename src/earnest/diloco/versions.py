"""Weights as versions: a trainer publishes, samplers follow, and a probe proves that both compute the same.

    versions/{n}     the adapter in full, or, with ``base``, only where it differs from version ``base`` in bf16
                     (PULSESync, 2602.03839); and the trainer's log-probs of a fixed probe text

A sampler that loaded version n scores the probe with its own kernels and precision and compares. Two policies that
differ by a stale or half-loaded adapter differ by far more than kernels do: then it raises, and never samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from earnest.diloco.errors import Damaged
from earnest.diloco.store import Bucket
from earnest.diloco.wire import pack_gaps, unpack_gaps
from earnest.errors import EarnestError


class ProbeFailed(EarnestError):
    """A sampler's log-probs of the probe are not the trainer's: it does not have the weights that it should."""


@dataclass(frozen=True)
class Version:
    """One published state. ``tokens`` and ``logprobs``: the probe, and what the trainer thinks of it."""

    number: int
    tensors: Mapping[str, Tensor]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    base: int | None
    size: int


@torch.no_grad()
def probe(policy: Any, tokens: Sequence[int]) -> tuple[float, ...]:
    """log p(tokens[t] | tokens[:t]) for t ≥ 1, in fp32, by the policy as it is now."""
    ids = torch.tensor([list(tokens)], device=policy.device)
    hidden = policy.hidden(ids)[0]
    from earnest.engines import scoring

    logits = scoring.all_logits(hidden[:-1], policy.head).logits.float()
    picked = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return tuple(float(x) for x in picked)


class Publisher:
    """The trainer's side. ``full_every`` versions a whole one is written, from which a new sampler can start."""

    def __init__(self, bucket: Bucket, policy: Any, adapter: Any, tokens: Sequence[int], full_every: int = 20) -> None:
        self.bucket, self.policy, self.adapter = bucket, policy, adapter
        self.tokens, self.full_every = tuple(tokens), full_every
        self.sent: dict[str, Tensor] = {}
        self.last: int | None = None

    def publish(self, number: int) -> int:
        """Write version ``number``; the bytes that it takes. Numbers rise; a number is published once."""
        state = {k: v.float().cpu() for k, v in self.adapter.state_dict().items()}
        base = self.last if self.last is not None and number % self.full_every else None
        tensors = _patch(state, self.sent) if base is not None else dict(state)
        meta = {
            "number": number,
            "base": base,
            "tokens": list(self.tokens),
            "logprobs": list(probe(self.policy, self.tokens)),
        }
        from safetensors.torch import save

        payload = save({k: v.contiguous() for k, v in tensors.items()}, {"version": str(number)})
        if not self.bucket.create(_key(number), "version", payload, meta):
            raise EarnestError(f"version {number} is published already in {self.bucket.url}; numbers rise.")
        # What a follower has now: where a patch left a weight as it was, it is not quite the trainer's.
        self.sent = dict(state) if base is None else apply_patch(self.sent, tensors)
        self.last = number
        return len(payload)


class Follower:
    """A sampler's side."""

    def __init__(self, bucket: Bucket, policy: Any, adapter: Any, tolerance: float = 0.02) -> None:
        self.bucket, self.policy, self.adapter, self.tolerance = bucket, policy, adapter, tolerance
        self.held: dict[str, Tensor] = {}
        self.number: int | None = None

    def newest(self) -> int | None:
        numbers = [int(key.rsplit("/", 1)[1]) for key in self.bucket.list("versions/")]
        return max(numbers, default=None)

    def follow(self) -> float:
        """Become the newest version, by patches where possible; the largest difference of the probe's log-probs."""
        newest = self.newest()
        if newest is None:
            raise EarnestError(f"nothing is published in {self.bucket.url} yet; wait for the trainer's first version.")
        if newest == self.number:
            return 0.0
        chain: list[Version] = []
        wanted: int | None = newest
        while wanted is not None and wanted != self.number:
            chain.append(self.read(wanted))
            wanted = chain[-1].base
        held = self.held
        for version in reversed(chain):
            held = dict(version.tensors) if version.base is None else apply_patch(held, dict(version.tensors))
        self.adapter.load_state_dict(held)
        apart = self.check(chain[0])
        self.held, self.number = held, newest  # only now: who asks again after a failed probe is checked again
        return apart

    def read(self, number: int) -> Version:
        from safetensors.torch import load

        found = self.bucket.get(_key(number))
        if found is None:
            raise Damaged(f"version {number} is gone from {self.bucket.url}")
        meta = found.meta
        return Version(
            number, load(found.payload), tuple(meta["tokens"]), tuple(meta["logprobs"]), meta["base"], found.size
        )

    def check(self, version: Version) -> float:
        """Score the probe here, and compare with what the trainer had."""
        mine = probe(self.policy, version.tokens)
        apart = [abs(a - b) for a, b in zip(mine, version.logprobs, strict=True)]
        worst = math.nan if any(map(math.isnan, apart)) else max(apart)  # max() would pass over a NaN
        if not worst <= self.tolerance:
            raise ProbeFailed(
                f"version {version.number}: log-probs of the probe differ by {worst:.4f}, allowed are "
                f"{self.tolerance:g}. This sampler does not have the trainer's weights: load them in full, in the "
                "trainer's precision, and look for another base model."
            )
        return worst


def _key(number: int) -> str:
    return f"versions/{number:08d}"


def _patch(state: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values and places where the bf16 weight changed."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        at = (value.bfloat16() != held[name].bfloat16()).reshape(-1).nonzero()[:, 0]
        out[f"{name}|gaps"] = pack_gaps(at)
        out[f"{name}|values"] = value.reshape(-1)[at]
    return out


def apply_patch(held: Mapping[str, Tensor], patch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, value in held.items():
        flat = value.clone().reshape(-1)
        flat[unpack_gaps(patch[f"{name}|gaps"])] = patch[f"{name}|values"]
        out[name] = flat.view(value.shape)
    return out
