"""One need on one block of rows: its value, and its derivative by the logits in closed form.

    log-prob    z_y - lse(z)          e_y - p
    entropy     -Σ p log p            -p·(log p + entropy)
    divergence  formulas.gjs          formulas.gjs, spread over the vocabulary by ``support``

Shapes: b rows, V vocabulary, K targets per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.engines.vocabulary import formulas
from earnest.engines.vocabulary.eager import source_entropy
from earnest.engines.vocabulary.plan import TokenNeed
from earnest.engines.vocabulary.scratch import Scratch
from earnest.engines.vocabulary.support import compare
from earnest.objectives.needs import Entropy, LogProb, SourceEntropy
from earnest.signals.distributions import TopK


@dataclass(frozen=True, eq=False)
class Block:
    """A need's values on one block of rows; ``slope`` = ∂(weight·value)/∂z, with weight 1 if none is given."""

    value: Tensor
    ran: str
    slope: Float[Tensor, "b V"] | None = None
    student_mass: Float[Tensor, " b"] | None = None
    teacher_mass: Float[Tensor, " b"] | None = None


def block(
    need: TokenNeed,
    z: Float[Tensor, "b V"],
    targets: Int[Tensor, " b"] | Int[Tensor, "b K"] | None,
    source: Float[Tensor, "b V"] | TopK | None,
    *,
    slope: bool,
    weight: Tensor | None,
    out: Scratch,
) -> Block:
    """``weight`` is the loss's derivative by the value; it is required if a row has K values."""
    if isinstance(need, SourceEntropy):
        assert source is not None
        return Block(*source_entropy(source, need.temperature))
    if need.temperature != 1:
        z = torch.div(z, need.temperature, out=out(z))
    if isinstance(need, LogProb):
        assert targets is not None
        return _logprob(z, targets, need.temperature, slope, weight, out)
    if isinstance(need, Entropy):
        value, by_logits = formulas.entropy(torch.log_softmax(z, -1, out=out(z)), slope=slope, out=out)
        return Block(value, "entropy", _weighted(by_logits, weight, need.temperature))
    assert source is not None
    found = compare(z, source, need, slope=slope, out=out)
    by_logits = found.by_logits(z, out) if slope else None
    by_logits = _weighted(by_logits, weight, need.temperature)
    return Block(found.value, found.ran, by_logits, found.student_mass, found.teacher_mass)


def _logprob(
    z: Float[Tensor, "b V"], targets: Tensor, temperature: float, slope: bool, weight: Tensor | None, out: Scratch
) -> Block:
    p = torch.softmax(z, -1, out=out(z))
    # The most probable token's probability is 1/Σexp(z - max): it gives the normaliser without a second exponential.
    norm = z.amax(-1) - p.amax(-1).log()
    ids = targets if targets.ndim == 2 else targets[:, None]
    value = z.gather(-1, ids) - norm[:, None]
    by_logits = None
    if slope:
        if weight is None:
            assert targets.ndim == 1, "K values per row have K derivatives: the backward pass needs their weights"
            each = torch.ones_like(value)
        else:
            each = weight.to(z.dtype).view(value.shape)
        each = each / temperature
        by_logits = p.mul_(-each.sum(-1, keepdim=True)).scatter_add_(-1, ids, each)
    return Block(value if targets.ndim == 2 else value[:, 0], "logprob", by_logits)


def _weighted(
    slope: Float[Tensor, "b V"] | None, weight: Float[Tensor, " b"] | None, temperature: float
) -> Tensor | None:
    if slope is None or (weight is None and temperature == 1):
        return slope
    if weight is None:
        return slope.div_(temperature)
    return slope.mul_((weight.to(slope.dtype) / temperature)[:, None])
