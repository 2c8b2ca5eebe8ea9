"""The KL baseline of unpaired preferences (KTO, arXiv 2402.01306, section 4.1).

    z₀ = max(0, mean over rows i of Σ_t w_t·(log π(y_i,t | x_j) - log π₀(y_i,t | x_j))),   x_j another row's prompt

An answer after a prompt that it does not belong to is close to a sample of neither policy, so the paper takes the mean
over such mismatched rows for an estimate of KL(π‖π₀) that is cheap. It has no gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.errors import SignalError
from earnest.signals.batch import Batch
from earnest.signals.scorer import Scorer, Who, logprobs
from earnest.signals.teachers import informed_rows


def kl_baseline(engine: Scorer, batch: Batch, reference: Who = "base") -> Float[Tensor, " R"]:
    """z₀ of the live policy, once for each row of the batch. Each chosen or rejected row is paired with the prompt of
    the next such row whose prompt differs and is short enough for the model's context; a row without one is left out of
    the mean."""
    mismatched = informed_rows(batch, mismatched_prompts(batch, engine.policy.positions))
    gap = logprobs(engine, mismatched, "live").double() - logprobs(engine, mismatched, reference).double()
    sums = torch.zeros(len(mismatched), dtype=torch.float64, device=gap.device)
    sums = sums.index_add(0, mismatched.row, gap * mismatched.token_weight.double())
    return sums.mean().clamp(min=0.0).float().expand(len(batch)).clone()


def mismatched_prompts(batch: Batch, positions: int | None) -> dict[int, list[int]]:
    """For each chosen or rejected row that has one, the prompt of another row in tokens."""
    rows = [r for r, role in enumerate(batch.role) if role in ("chosen", "rejected") and batch.sizes[r]]
    starts = {r: int(batch.position[batch.tokens_of([r])[0]]) for r in rows}
    prompts = {r: batch.inputs[r, : starts[r] + 1].tolist() for r in rows}
    found: dict[int, list[int]] = {}
    for place, r in enumerate(rows):
        room = (positions or 2**31) - (batch.lengths[r] - starts[r] - 1)
        others = (prompts[other] for other in rows[place + 1 :] + rows[:place])
        other = next((prompt for prompt in others if prompt != prompts[r] and len(prompt) <= room), None)
        if other is not None:
            found[r] = other
    if not found:
        raise SignalError(
            f"the KL baseline compares answers after another row's prompt, and the {len(rows)} chosen and rejected "
            "rows of this batch have no second prompt that fits; take more rows per step "
            "(sampling.prompts_per_step), or baseline=zero."
        )
    return found
