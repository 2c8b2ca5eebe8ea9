"""A policy's log-probs at given tokens, from its hidden states, one chunk of tokens at a time; without a gradient.

lp_v = z_v - logsumexp(z);   tail = logsumexp of the logits outside the top K, not log(1 - Σ p)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.errors import SignalError
from earnest.models.policy import HeadSpec
from earnest.signals.distributions import FullLogits, TopK

CHUNK_BYTES = 64 * 2**20


def _chunks(hidden: Float[Tensor, "N d"], head: HeadSpec) -> list[slice]:
    rows = max(1, CHUNK_BYTES // (4 * head.weight.shape[0]))
    return [slice(i, i + rows) for i in range(0, hidden.shape[0], rows)]


@torch.no_grad()
def top_k(hidden: Float[Tensor, "N d"], head: HeadSpec, k: int) -> TopK:
    """The k most probable tokens of every position, their log-probs, and the log of the remaining mass."""
    vocabulary = head.weight.shape[0]
    if not 1 <= k <= vocabulary:
        raise SignalError(f"top-K needs 1 ≤ K ≤ {vocabulary} (the vocabulary), got {k}.")
    return _kept(hidden, head, lambda logits, _: logits.topk(k, -1).indices)


def _kept(hidden: Float[Tensor, "N d"], head: HeadSpec, choose: Callable[[Tensor, slice], Tensor]) -> TopK:
    """The tokens that ``choose(logits, rows)`` gives for each chunk of rows, and the log of the remaining mass."""
    ids, logprobs, tails = [], [], []
    for part in _chunks(hidden, head):
        logits = head.logits(hidden[part])
        norm, index = logits.logsumexp(-1), choose(logits, part)
        ids.append(index)
        logprobs.append((logits.gather(-1, index) - norm[:, None]).clamp(max=0))
        tails.append(logits.scatter(-1, index, float("-inf")).logsumexp(-1) - norm)
    return TopK(torch.cat(ids), torch.cat(logprobs), torch.cat(tails))


@torch.no_grad()
def at_ids(hidden: Float[Tensor, "N d"], head: HeadSpec, ids: Int[Tensor, "N K"]) -> Float[Tensor, "N K"]:
    """Exact log-probs at the given ids."""
    if ids.shape[0] != hidden.shape[0]:
        raise SignalError(f"ids for {ids.shape[0]} tokens were given, the batch has {hidden.shape[0]} active ones.")
    parts = [head.logits(hidden[p]).log_softmax(-1).gather(-1, ids[p]) for p in _chunks(hidden, head)]
    return torch.cat(parts)


@torch.no_grad()
def at_ids_and_tail(hidden: Float[Tensor, "N d"], head: HeadSpec, ids: Int[Tensor, "N K"]) -> TopK:
    """Exact log-probs at the given ids, and the log of the remaining mass."""
    return _kept(hidden, head, lambda _, part: ids[part])


@torch.no_grad()
def all_logits(hidden: Float[Tensor, "N d"], head: HeadSpec) -> FullLogits:
    return FullLogits(torch.cat([head.logits(hidden[p]) for p in _chunks(hidden, head)]))
