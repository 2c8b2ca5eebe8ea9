"""The parts of a pass over a batch: scalars as leaves, derivatives by them, the sum over micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from earnest.errors import ObjectiveError
from earnest.objectives import metrics
from earnest.objectives.base import Objective, Value
from earnest.objectives.needs import Need, SpectralNorm
from earnest.objectives.view import Field
from earnest.signals.batch import Batch


def refuse_batch_local(objective: Objective, parts: int) -> None:
    """Raise if a term divides by each micro-batch's own counts: it has no value on the whole batch at once."""
    for weighted in objective.live():
        if "batch_local" in weighted.term.laws:
            whole = next(w.term.label for w in objective.live() if not w.term.additive)
            raise ObjectiveError(
                f"{weighted.term.label}: divides by the tokens of each micro-batch, but {whole} needs the whole batch "
                f"at once, and this batch is cut into {parts}. Raise micro_tokens until it is one part, or use dapo."
            )


def token_needs(needs: Sequence[Need]) -> list[Need]:
    return [n for n in needs if not isinstance(n, SpectralNorm)]


def coverage(batch: Batch, need: Need) -> Tensor | None:
    return batch.teacher.at if getattr(need, "source", None) == "teacher" and batch.teacher is not None else None


def leaves(fields: Mapping[Need, Field]) -> dict[Need, Field]:
    return {
        n: replace(f, values=f.values.detach().requires_grad_(f.values.is_floating_point())) for n, f in fields.items()
    }


def derivatives(loss: Tensor, leaves: Mapping[Need, Field]) -> dict[Need, Tensor]:
    """∂loss/∂scalar for every scalar that the loss depends on."""
    if not loss.requires_grad:
        return {}
    with torch.enable_grad():
        grads = torch.autograd.grad(loss, [f.values for f in leaves.values()], allow_unused=True)
    return {need: g for need, g in zip(leaves, grads, strict=True) if g is not None}


def detached(values: Mapping[str, Value]) -> dict[str, Value]:
    """The values without their graph."""
    return {label: replace(value, loss=value.loss.detach()) for label, value in values.items()}


def merge(found: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    whole: dict[str, Value] = {}
    for values in found:
        for label, value in values.items():
            if label not in whole:
                whole[label] = value
                continue
            first = whole[label]
            ran = first.ran if first.ran == value.ran else f"{first.ran} | {value.ran}"
            loss = first.loss.detach() + value.loss.detach()
            whole[label] = replace(first, loss=loss, ran=ran, metrics=metrics.merge([first.metrics, value.metrics]))
    return whole
