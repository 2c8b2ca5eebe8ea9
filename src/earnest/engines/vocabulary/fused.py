"""The vocabulary pass: every per-token scalar from one sweep over hidden states × head, a chunk of tokens at a time.

No tensor of tokens × vocabulary exists, forward or backward. The derivative is computed in one of three ways, and the
field's ``ran`` names it:

    values              no derivative is needed
    forward-derivative  ∂scalar/∂h, one d-vector per token and scalar, is made with the logits; backward scales it
    recompute           backward makes the logits again; one product gives the derivatives of all scalars and the head

For N tokens, k scalars and s sources given as hidden states, forward-derivative takes 1 + k + s products of N·d·V and
recompute 3 + 2s; the smaller number wins. A head that needs a gradient (trained, or with an adapter), or K targets per
token, always recompute.
Shapes: N tokens, M covered ones, n rows of a chunk, d width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from earnest.engines.vocabulary import plan, product
from earnest.engines.vocabulary.plan import TokenNeed
from earnest.engines.vocabulary.product import Product
from earnest.engines.vocabulary.sweep import Found, Sweep
from earnest.models.head import HeadSpec
from earnest.objectives.needs import Divergence, LogProb, Need, SourceEntropy
from earnest.objectives.view import Field
from earnest.signals.batch import Batch
from earnest.signals.distributions import Hidden

BUDGET_BYTES = 576 * 2**20

Path = Literal["values", "forward-derivative", "recompute"]


def scalars(
    hidden: Float[Tensor, "N d"],
    head: HeadSpec,
    batch: Batch,
    needs: Sequence[Need],
    *,
    budget_bytes: int = BUDGET_BYTES,
) -> dict[Need, Field]:
    """Every need's field, differentiable by ``hidden`` and by the head's trainable tensors.

    ``budget_bytes`` limits the logits that exist at one time; more than about 300 MiB gains no speed.
    """
    todo = plan.make(needs, batch, head, hidden)
    if not todo.needs:
        return {}
    factor = product.of(head, hidden.dtype)
    if factor.leaves:
        plan.check_trained_head(todo, batch)
    sweep = Sweep(todo, factor, batch.token_target, vocabulary=head.weight.shape[0], budget_bytes=budget_bytes)
    trains = torch.is_grad_enabled() and (hidden.requires_grad or bool(factor.leaves))
    if not trains:
        path: Path = "values"
        found: Mapping[TokenNeed, Found] = sweep.values(hidden.detach())
        values = {need: f.values for need, f in found.items()}
    else:
        path = choose(todo, hidden.shape[0], factor, many_targets=batch.token_target.ndim == 2, plain=head.plain)
        run = _Run(sweep, path)
        outputs = _Pass.apply(run, hidden, *factor.leaves)
        values = dict(zip(run.needs, outputs, strict=True))
        found = run.found
    return {need: _field(need, values[need], found[need], todo, path) for need in todo.needs}


def choose(todo: plan.Plan, tokens: int, factor: Product, *, many_targets: bool, plain: bool) -> Path:
    """The path with fewer products, counted in rows of hidden states × head."""
    if factor.leaves or not plain or (many_targets and any(isinstance(n, LogProb) for n in todo.needs)):
        return "recompute"
    derivatives = sum(
        tokens if (at := todo.at(n)) is None else at.shape[0] for n in todo.needs if not isinstance(n, SourceEntropy)
    )
    sources = sum(len(c.distribution) for c in todo.sources.values() if isinstance(c.distribution, Hidden))
    return "forward-derivative" if tokens + derivatives + sources <= 3 * tokens + 2 * sources else "recompute"


def _field(need: TokenNeed, values: Tensor, found: Found, todo: plan.Plan, path: Path) -> Field:
    metrics = todo.metrics(need, found.student_mass, found.teacher_mass)
    field = Field(values, todo.at(need), f"{found.ran} [{path}]", metrics)
    return replace(field, divergence=found.ran, estimator="exact") if isinstance(need, Divergence) else field


class _Run:
    """The data that the autograd function's forward and backward share."""

    def __init__(self, sweep: Sweep, path: Path) -> None:
        self.sweep, self.path = sweep, path
        self.needs: tuple[TokenNeed, ...] = ()
        self.found: Mapping[TokenNeed, Found] = {}


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, hidden: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run = run
        sweep = run.sweep
        derive = run.path == "forward-derivative"
        run.found = sweep.values(hidden.detach(), derive=derive)
        run.needs = tuple(run.found)
        if derive:
            ctx.derived = [n for n in run.needs if run.found[n].by_hidden is not None]
            ctx.save_for_backward(*(run.found[n].by_hidden for n in ctx.derived))
            ctx.like = (hidden.shape, hidden.dtype)
        else:
            ctx.save_for_backward(hidden, *leaves)
        outputs = tuple(run.found[n].values for n in run.needs)
        ctx.mark_non_differentiable(*(run.found[n].values for n in run.needs if isinstance(n, SourceEntropy)))
        # The graph holds the run: what the run holds of the graph's own tensors would never be freed.
        run.found = {n: replace(f, values=f.values.detach(), by_hidden=None) for n, f in run.found.items()}
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        run: _Run = ctx.run
        weights: dict[TokenNeed, Tensor] = {
            n: u for n, u in zip(run.needs, upstream, strict=True) if u is not None and not isinstance(n, SourceEntropy)
        }
        if run.path == "forward-derivative":
            return (None, _scale(dict(zip(ctx.derived, ctx.saved_tensors, strict=True)), weights, ctx.like, run.sweep))
        hidden, *leaves = ctx.saved_tensors
        into = [torch.zeros(t.shape, dtype=run.sweep.dtype, device=t.device) for t in leaves]
        by_hidden = run.sweep.pull(hidden.detach(), weights, into)
        return (None, by_hidden.to(hidden.dtype), *(g.to(t.dtype) for g, t in zip(into, leaves, strict=True)))


def _scale(
    derived: Mapping[TokenNeed, Tensor],
    weights: Mapping[TokenNeed, Tensor],
    like: tuple[torch.Size, torch.dtype],
    sweep: Sweep,
) -> Float[Tensor, "N d"]:
    """Σ_k weight_k · ∂scalar_k/∂h."""
    shape, dtype = like
    total = torch.zeros(shape, dtype=sweep.dtype, device=sweep.targets.device)
    for need, weight in weights.items():
        part, at = derived[need], sweep.todo.at(need)
        weight = weight.to(sweep.dtype)[:, None]
        if at is None:
            total.addcmul_(part, weight)
        else:
            total.index_add_(0, at, part * weight)
    return total.to(dtype)
