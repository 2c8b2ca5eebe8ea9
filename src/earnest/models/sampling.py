"""How a token is drawn, with its exact behaviour log-prob; ``slots`` samples with it.

    token = min {v : Σ_{w ≤ v} π(w) > u},    u = U(seed, prompt, draw)[step]         (inverse CDF)
    logprob = log π(token),    π = softmax(z / T), renormalised over what top-k and top-p leave

u comes from a counter-based generator (Philox; Salmon et al., SC 2011) keyed by the seed, the prompt's tokens and the
number of the draw from that prompt. So a completion is a function of (weights, prompt, seed, draw) and does not depend
on the batch, up to the rounding of matrix products of other shapes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from earnest.errors import EarnestError, SamplingError
from earnest.settings import Checked, setting

if TYPE_CHECKING:
    from earnest.models.policy import Policy
    from earnest.models.protocol import PolicyLike

_BLOCKS = 128  # of the vocabulary, in which the token of a number is searched
_WHOLE = 8192  # tokens of a vocabulary that is searched in one piece


@dataclass(frozen=True, kw_only=True)
class SampleSpec(Checked):
    """temperature 0 is greedy, and its log-probs are those at temperature 1. top_k 0 and top_p 1 are off.

    Order: temperature, then top-k, then top-p (the smallest set of mass ≥ top_p). A completion ends with the token that
    ends the turn or completes one of the ``stop`` strings, and includes that token. ``stop_ids`` replace the model's
    end-of-turn ids; an empty tuple means that no id ends a completion.
    """

    error: ClassVar[type[EarnestError]] = SamplingError

    max_new_tokens: int = setting(32, "the longest completion, in tokens", at_least=1)
    temperature: float = setting(1.0, "the sampling temperature; 0 is greedy", at_least=0.0)
    top_p: float = setting(
        1.0, "the mass of the most probable tokens that are kept; 1 keeps all", above=0.0, at_most=1.0
    )
    top_k: int = setting(0, "the number of most probable tokens that are kept; 0 keeps all", at_least=0)
    seed: int = setting(0, "the same seed gives the same completions")
    stop: tuple[str, ...] = setting((), "texts that end a completion")
    stop_ids: tuple[int, ...] | None = setting(None, "token ids that end a completion; none: the model's own")

    def ends(self, policy: PolicyLike) -> frozenset[int]:
        """The ids that end a completion."""
        return policy.eos_ids if self.stop_ids is None else frozenset(self.stop_ids)


@dataclass(frozen=True)
class Completion:
    """``tokens`` include the eos, if there is one; ``logprobs`` are under the sampled distribution."""

    prompt_index: int
    sample_index: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class SampleRow:
    """A completion to sample: the ``draw``-th among those of the same prompt, of at most ``limit`` tokens."""

    prompt_index: int
    sample_index: int
    prompt: tuple[int, ...]
    draw: int
    limit: int = 2**31


def uniforms(rows: Sequence[SampleRow], seed: int, steps: int) -> Float64[np.ndarray, "R S"]:
    """Row i's numbers in [0, 1), one per step; a function of (seed, prompt, draw)."""
    out = np.empty((len(rows), steps))
    heads: dict[tuple[int, ...], Any] = {}
    for i, row in enumerate(rows):
        head = heads.get(row.prompt)
        if head is None:
            head = heads[row.prompt] = hashlib.blake2b(
                np.asarray([seed, *row.prompt], dtype="<i8").tobytes(), digest_size=16
            )
        key = head.copy()
        key.update(row.draw.to_bytes(8, "little"))
        out[i] = np.random.Generator(np.random.Philox(key=int.from_bytes(key.digest(), "little"))).random(steps)
    return out


def pick(
    logits: Float[Tensor, "r V"], u: Float[Tensor, " r"], spec: SampleSpec
) -> tuple[Int[Tensor, " r"], Float[Tensor, " r"]]:
    """The token that each row's number u chooses, and its log-prob under the sampled distribution."""
    if spec.temperature == 0:
        token = logits.argmax(-1, keepdim=True)
        return token[:, 0], logits.log_softmax(-1).gather(-1, token)[:, 0]
    scaled = logits if spec.temperature == 1 else logits / spec.temperature
    p = truncate(scaled, spec.top_k, spec.top_p).softmax(-1)
    token = _inverse_cdf(p, u[:, None])
    return token[:, 0], p.gather(-1, token)[:, 0].log()


def _inverse_cdf(p: Float[Tensor, "r V"], u: Float[Tensor, "r 1"]) -> Int[Tensor, "r 1"]:
    """min {v : Σ_{w ≤ v} p(w) > u Σ p}, in the precision of u. In a large vocabulary first the block, then the token in
    it, so that no [r, V] of that precision is formed."""
    rows, vocabulary = p.shape
    if vocabulary <= _WHOLE:
        cdf = p.cumsum(-1, dtype=u.dtype)
        return _first_above(cdf, u * cdf[:, -1:])
    width = -(-vocabulary // _BLOCKS)
    if width * _BLOCKS != vocabulary:
        p = torch.nn.functional.pad(p, (0, width * _BLOCKS - vocabulary))
    blocks = p.view(rows, _BLOCKS, width)
    ends = blocks.sum(-1, dtype=u.dtype).cumsum_(-1)
    goal = u * ends[:, -1:]
    block = _first_above(ends, goal)
    before = torch.nn.functional.pad(ends, (1, 0)).gather(-1, block)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, width))[:, 0].cumsum(-1, dtype=u.dtype)
    return (block * width + _first_above(inside, goal - before)).clamp_max_(vocabulary - 1)


def _first_above(cdf: Float[Tensor, "r n"], goal: Float[Tensor, "r 1"]) -> Int[Tensor, "r 1"]:
    """min {i : cdf(i) > goal}. The goal is taken strictly below the total, so the entry found has a mass above 0."""
    total = cdf[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    return torch.searchsorted(cdf, torch.minimum(goal, below), right=True).clamp_max_(cdf.shape[-1] - 1)


def truncate(logits: Float[Tensor, "r V"], top_k: int, top_p: float) -> Float[Tensor, "r V"]:
    """-inf outside the top-k (ties at the edge stay) and outside the smallest set of mass ≥ top_p."""
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, -1).values[:, -1:], -math.inf)
    if top_p < 1:
        ordered, index = logits.sort(dim=-1, descending=True, stable=True)
        p = ordered.softmax(-1)
        outside = p.cumsum(-1) - p >= top_p  # the mass before it is already enough
        logits = logits.masked_fill(outside.scatter(-1, index, outside), -math.inf)
    return logits


@contextmanager
def evaluating(policy: Policy) -> Iterator[None]:
    """Inside the block: no gradients, and every module in eval mode; afterwards each has its own mode again. Not
    inference_mode: the next training step uses what adapters cache while sampling."""
    training = [m for m in policy.model.modules() if m.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
