"""A service's scores of a batch's targets, one row per request: log-probs, the top K, given ids.

A sampler scores a text, so a row must be one: at every active token, the target is the next input.
Shapes: N active tokens, K ids per token.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.engines.vocabulary.known import tail_of
from earnest.errors import ObjectiveError, SignalError
from earnest.signals.batch import Batch
from earnest.signals.distributions import TopK
from earnest.signals.scorer import AtIdsWanted, LogProbsWanted, TopKWanted, Wanted


def score(sampler: Any, batch: Batch, want: Wanted) -> Tensor | TopK:
    """``sampler`` is a ``tinker.SamplingClient``; the requests of all rows are under way together."""
    from tinker import types

    if isinstance(want, LogProbsWanted) and want.temperature != 1:
        raise ObjectiveError(
            f"a remote engine scores at temperature 1, not {want.temperature:g}; sample at temperature 1."
        )
    if not isinstance(want, LogProbsWanted | TopKWanted | AtIdsWanted):
        raise ObjectiveError(f"a remote engine cannot give {type(want).__name__}; use log-probs or a top-K.")
    one = types.SamplingParams(max_tokens=1)
    asked = []
    for row in range(len(batch)):
        prompt = types.ModelInput.from_ints(text_of(batch, row))
        if isinstance(want, AtIdsWanted):
            cells = types.TensorData.from_torch_sparse(_cells(batch, row, want.ids), pad_value=-1)
            asked.append(sampler.sample(prompt, 1, one, target_prompt_logprobs=cells))
        else:
            k = want.k if isinstance(want, TopKWanted) else 0
            asked.append(sampler.sample(prompt, 1, one, include_prompt_logprobs=True, topk_prompt_logprobs=k))
    found = [future.result() for future in asked]
    if isinstance(want, AtIdsWanted):
        return torch.cat([f.target_prompt_logprobs.to_torch()[positions(batch, r)] for r, f in enumerate(found)])
    if isinstance(want, LogProbsWanted):
        return torch.cat(
            [torch.tensor(f.prompt_logprobs_np.tolist())[1 + positions(batch, r)] for r, f in enumerate(found)]
        )
    ids, logprobs = [], []
    for r, f in enumerate(found):
        top, at = f.topk_prompt_logprobs_np, 1 + positions(batch, r)
        ids.append(torch.from_numpy(top.token_ids.astype("int64"))[at])
        logprobs.append(torch.from_numpy(top.logprobs)[at])
    values = torch.cat(logprobs).clamp(max=0)
    return TopK(torch.cat(ids), values, tail_of(values).float())


def positions(batch: Batch, row: int) -> Int[Tensor, " n"]:
    """The active positions of a row."""
    return batch.position[batch.row == row]


def text_of(batch: Batch, row: int) -> list[int]:
    """The row as one text: its inputs and its last target."""
    if batch.targets.ndim == 3:
        raise SignalError("a sampler scores one target per position; the batch has several.")
    n, at = int(batch.length[row]), positions(batch, row)
    inputs, targets = batch.inputs[row, :n], batch.targets[row, :n]
    following = torch.cat([inputs[1:], targets[-1:]])
    if not torch.equal(following[at], targets[at]):
        raise SignalError(f"row {row}: its targets are not its next tokens, so no text has these log-probs.")
    return batch.whole_row(row)


def _cells(batch: Batch, row: int, ids: Int[Tensor, "N K"]) -> Int[Tensor, "n K"]:
    """[length, K] ids for a row, -1 where no score is wanted."""
    cells = torch.full((int(batch.length[row]), ids.shape[1]), -1)
    cells[positions(batch, row)] = ids[batch.row == row]
    return cells


def mixed(weights: list[float], logprobs: list[Float[Tensor, "N K"]]) -> Float[Tensor, "N K"]:
    """log Σ w·p of several samplers at the same ids."""
    stacked = torch.stack(
        [lp.double() + torch.tensor(w).double().log() for w, lp in zip(weights, logprobs, strict=True)]
    )
    return stacked.logsumexp(0).float().clamp(max=0)
