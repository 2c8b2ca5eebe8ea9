"""Forward and backward passes for a list of datums: log-probs of all targets, their loss, added gradients.

    lp = log softmax(z)[target]   →   L = Σ_datums loss(lp)   →   grad += Σ ∂L/∂lp · ∂lp/∂θ

The datums run in micro-batches, and the turn is yielded between them. Every loss is a sum over datums, so the cut does
not change it. A pass that fails leaves the gradients as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from earnest.engines import micro
from earnest.engines.local import LocalEngine
from earnest.engines.vocabulary import scalars
from earnest.objectives import Term
from earnest.objectives.needs import LogProb
from earnest.serve.tinker import losses
from earnest.serve.tinker.data import Datum, PassOutput, PassRequest
from earnest.serve.tinker.errors import WireError
from earnest.signals.batch import Batch, Role

_LP = LogProb()
_ROLE: Role = "demonstration"


def check(request: PassRequest, vocabulary: int, positions: int | None) -> Term:
    """The loss of a request; refused where a datum does not fit it or the model."""
    loss = losses.configured(losses.find(request.loss_fn), request.config)
    if not request.data:
        raise WireError("the request has no data.")
    for index, datum in enumerate(request.data):
        where = f"datum {index}"
        losses.check(loss, datum.inputs, request.config, where)
        targets, length = datum.targets, len(datum.tokens)
        if targets.is_floating_point() or targets.ndim not in (1, 2) or not length or targets.shape[0] != length:
            raise WireError(
                f"{where}: {length} input tokens and target_tokens of shape {tuple(targets.shape)}, {targets.dtype}; "
                "give one integer target (or one row of K) for each input token, and at least one."
            )
        if positions is not None and length > positions:
            raise WireError(f"{where}: {length} tokens are more than the {positions} positions of the model.")
        ids = torch.cat([torch.tensor(datum.tokens), targets.flatten()])
        if not targets.numel() or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise WireError(f"{where}: a token id lies outside 0…{vocabulary - 1}, the model's vocabulary.")
    return loss


def run(engine: LocalEngine, request: PassRequest, loss: Term, pause: Callable[[], None]) -> PassOutput:
    """The pass, inside a turn with the engine's adapter active; ``pause`` is called between micro-batches."""
    found: dict[int, Tensor] = {}
    total = 0.0
    held = [None if p.grad is None else p.grad.clone() for p in engine.parameters]
    try:
        with torch.set_grad_enabled(not request.forward_only):
            for batch in batches(request.data):
                for part in micro.cut(batch.to(engine.policy.device), engine.micro_tokens):
                    total += _part(engine, part.batch, request, loss, found)
                    pause()
    except BaseException:
        for p, grad in zip(engine.parameters, held, strict=True):
            p.grad = grad
        raise
    return PassOutput(tuple(found[i] for i in range(len(request.data))), {"loss:sum": total})


def _part(engine: LocalEngine, batch: Batch, request: PassRequest, loss: Term, found: dict[int, Tensor]) -> float:
    """Add a micro-batch's gradients; its log-probs go into ``found``, by the number of their datum."""
    states = engine.policy.hidden(batch.inputs)[batch.row, batch.position]
    lp = scalars(states, engine.policy.head, batch, [_LP])[_LP].values
    leaf = lp.detach().requires_grad_(not request.forward_only)
    data = [request.data[i] for i in batch.group.tolist()]
    total = losses.evaluate(loss, batch, leaf, losses.flat_inputs(loss, data))
    value = float(total.detach())
    if not abs(value) < float("inf"):
        raise WireError(
            f"{loss.label}: the loss is {value}; look for extreme ratios between the datums' logprobs and the model's."
        )
    if not request.forward_only:
        (slope,) = torch.autograd.grad(total, leaf)
        torch.autograd.backward(lp, slope.to(lp.dtype))
    parts = lp.detach().float().cpu().split([len(datum.tokens) for datum in data])
    found.update(zip(batch.group.tolist(), parts, strict=True))
    return value


def batches(data: Sequence[Datum]) -> list[Batch]:
    """Batches of datums with the same number of targets per position; ``group`` is the datum's number of each row."""
    by_width: dict[int | None, list[int]] = {}
    for index, datum in enumerate(data):
        targets = datum.targets
        by_width.setdefault(None if targets.ndim == 1 else targets.shape[1], []).append(index)
    return [_batch(data, rows, width) for width, rows in by_width.items()]


def _batch(data: Sequence[Datum], rows: Sequence[int], width: int | None) -> Batch:
    length = torch.tensor([len(data[i].tokens) for i in rows])
    R, T = len(rows), int(length.max())
    shape = (R, T) if width is None else (R, T, width)
    inputs, targets = torch.zeros(R, T, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    weight = torch.zeros(shape)
    for r, i in enumerate(rows):
        n = len(data[i].tokens)
        inputs[r, :n] = torch.tensor(data[i].tokens)
        targets[r, :n] = data[i].targets
        weight[r, :n] = 1.0
    return Batch(
        inputs=inputs,
        targets=targets,
        weight=weight,
        length=length,
        role=(_ROLE,) * R,
        group=torch.tensor(list(rows)),
        pair=torch.full((R,), -1),
        policy_version=torch.zeros(R, dtype=torch.long),
    )
