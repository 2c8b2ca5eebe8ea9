"""The vocabulary pass in plain PyTorch: all logits at once, and autograd. Tests compare the fused pass with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.engines.vocabulary import formulas, plan
from earnest.engines.vocabulary.plan import Covered, TokenNeed
from earnest.engines.vocabulary.support import compare
from earnest.models.head import HeadSpec
from earnest.objectives.needs import Divergence, Entropy, LogProb, Need
from earnest.objectives.view import Field
from earnest.signals.batch import Batch
from earnest.signals.distributions import FullLogits, Hidden, TopK


def scalars(hidden: Float[Tensor, "N d"], head: HeadSpec, batch: Batch, needs: Sequence[Need]) -> dict[Need, Field]:
    """Every need's field, differentiable by ``hidden`` and by the head."""
    todo = plan.make(needs, batch, head, hidden)
    z = head.logits(hidden)
    return {need: _field(need, z, head, batch, todo) for need in todo.needs}


def _field(need: TokenNeed, z: Float[Tensor, "N V"], head: HeadSpec, batch: Batch, todo: plan.Plan) -> Field:
    if isinstance(need, LogProb):
        target = batch.token_target
        logp = _heated(z, need.temperature).log_softmax(-1)
        values = logp.gather(-1, target if target.ndim == 2 else target[:, None])
        return Field(values if target.ndim == 2 else values[:, 0], None, "logprob [eager]", {})
    if isinstance(need, Entropy):
        return Field(formulas.entropy(_heated(z, need.temperature).log_softmax(-1))[0], None, "entropy [eager]", {})
    covered = todo.sources[need.source]
    source = _source(covered, head, z.dtype)
    if isinstance(need, Divergence):
        mine = z if covered.at is None else z[covered.at]
        found = compare(_heated(mine, need.temperature), source, need)
        metrics = todo.metrics(need, found.student_mass, found.teacher_mass)
        return Field(found.value, covered.at, f"{found.ran} [eager]", metrics, found.ran, "exact")
    values, ran = source_entropy(source, need.temperature)
    return Field(values, covered.at, f"{ran} [eager]", {})


def _heated(z: Float[Tensor, "n V"], temperature: float) -> Float[Tensor, "n V"]:
    return z if temperature == 1 else z / temperature


def _source(covered: Covered, head: HeadSpec, dtype: torch.dtype) -> Float[Tensor, "M V"] | TopK:
    with torch.no_grad():
        match covered.distribution:
            case Hidden(states):
                return head.logits(states).to(dtype)
            case FullLogits(z):
                return z.to(dtype)
            case TopK() as top:
                return top


def source_entropy(source: Float[Tensor, "n V"] | TopK, temperature: float) -> tuple[Float[Tensor, " n"], str]:
    """The source's entropy; for a received top-K a lower bound, since its tail counts as one token."""
    with torch.no_grad():
        if isinstance(source, TopK):
            logp = torch.cat([source.logprobs, source.tail[:, None]], -1)
            logp = logp.to(torch.promote_types(logp.dtype, torch.float32))
            return formulas.entropy(logp)[0], "source_entropy, the tail as one token (a lower bound)"
        return formulas.entropy(_heated(source, temperature).log_softmax(-1))[0], "source_entropy"
