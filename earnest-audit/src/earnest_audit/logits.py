"""What passes through a model while the loss runs: the ids that it embeds, its logits (which show how a step of descent
changes the log-probs of a batch's targets), and the positions of its outputs at which the loss has a gradient.

Embeddings are recognised by value: an ``nn.Embedding`` is called with the batch's ids, or all but their last column.
Logits are recognised by a property: a loss of log-probs does not change when a constant is added to all logits of a
token, so its derivatives by them sum to 0 there; a small penalty on the normaliser (a z-loss) leaves little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit import edits
from earnest_audit.gradient import nodes
from earnest_audit.limits import NEAR
from earnest_audit.measure import Inputs
from earnest_audit.probe import Probe
from earnest_audit.restore import observed


@dataclass(frozen=True, eq=False)
class Descent:
    """Per target [B, T]: its log-prob; by how much descending the loss raises it, -⟨∂L/∂logits, ∂lp/∂logits⟩; and the
    cosine of these two vectors."""

    logprobs: Tensor
    rises: Tensor
    cosines: Tensor


def descent(probe: Probe) -> Descent | None:
    """None where it is unknown which logits predict which target, or the loss is no function of log-probs."""
    step = probe.step
    ids, labels = step.value("ids"), step.value("labels")
    targets, shift = ids if labels is None else labels, 0 if edits.ahead(step) else 1
    if targets is None or targets.ndim != 2 or (labels is not None and shift and not edits.in_place(step)):
        return None
    probe.cost += 1 / 3  # the backward pass ends at the logits
    value, seen = _outputs(probe, step.batch, step.terms_off)
    rows, width = targets.shape
    shapes = {(rows, width), (rows, width - shift)}
    fitting = [t for t in seen.values() if tuple(t.shape[:2]) in shapes and t.shape[2] > int(targets.max())]
    if not fitting or not value.requires_grad:
        return None
    try:
        slopes = torch.autograd.grad(value, fitting, allow_unused=True)
    except RuntimeError:  # reentrant checkpointing
        return None
    for logits, slope in zip(reversed(fitting), reversed(slopes), strict=True):
        size = 0.0 if slope is None else float(slope.abs().sum())
        if slope is not None and size > 0 and float(slope.sum(-1).abs().sum()) <= NEAR * size:
            return _of(logits.detach()[:, : width - shift], -slope[:, : width - shift], targets[:, shift:].clamp(min=0))
    return None


def _outputs(probe: Probe, batch: Mapping[str, Any], knobs: Inputs) -> tuple[Tensor, dict[nn.Module, Tensor]]:
    """The loss, and the outputs on the way to it of the modules that were called once."""
    seen: dict[nn.Module, list[Tensor]] = {}

    def keep(module: nn.Module, _args: Any, output: Any) -> None:
        found = output[0] if isinstance(output, tuple) and output else getattr(output, "logits", output)
        if isinstance(found, Tensor) and found.ndim == 3 and found.is_floating_point() and found.requires_grad:
            seen.setdefault(module, []).append(found)

    with observed(probe.step.model.modules(), keep):
        value, _ = probe.run(batch, knobs)
    return value, {module: calls[0] for module, calls in seen.items() if len(calls) == 1}


def positions(probe: Probe, batch: edits.Batch, knobs: Mapping[str, Any], on: Tensor) -> dict[nn.Module, Tensor]:
    """[2, B, T] for each output: where the loss has a gradient; and where it has one or none by design, as the output
    is certain of one entry. Of the outputs with the rows of ``on`` and room for its positions, those that reach the
    loss through no other one."""
    probe.cost += 2 / 3  # the backward pass ends at the outputs
    value, seen = _outputs(probe, batch, knobs)
    ends = {o.grad_fn: (m, o) for m, o in seen.items() if len(o) == len(on) and o.shape[1] >= on.sum(-1).max()}
    nearest = dict(ends[node] for node in nodes(value.grad_fn, ends) if node in ends)
    slopes = torch.autograd.grad(value, list(nearest.values())) if nearest else ()
    found = {}
    for (module, output), slope in zip(nearest.items(), slopes, strict=True):
        moved = (slope != 0).any(-1)
        certain = ((output.detach().float().softmax(-1) > 0).sum(-1) == 1) & (output.shape[2] > 1)
        found[module] = torch.stack([moved, moved | certain])
    return found


def _of(logits: Tensor, down: Tensor, targets: Tensor) -> Descent:
    """∂lp/∂logits is δ - p: 1 at the target, less every probability."""
    logs, down, at = logits.float().log_softmax(-1), down.float(), targets[..., None]
    probabilities, logprobs = logs.exp(), logs.gather(-1, at)[..., 0]
    rises = down.gather(-1, at)[..., 0] - (down * probabilities).sum(-1)
    length = (1 - 2 * logprobs.exp() + probabilities.square().sum(-1)).clamp_min(0).sqrt() * down.norm(dim=-1)
    return Descent(logprobs, rises, rises / length.clamp_min(1e-30))


@contextmanager
def embedded(model: nn.Module, given: Tensor, shown: Tensor) -> Iterator[list[str]]:
    """Inside, where an embedding is called with the ids ``given`` [B, T] it embeds ``shown`` [B, T] instead; yields the
    names of the embeddings that were."""
    replaced: list[str] = []
    names = {module: name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}

    def substitute(module: nn.Embedding, args: tuple[Any, ...]) -> Any:
        found = args[0] if args else None
        if not isinstance(found, Tensor) or found.ndim != 2:
            return None
        width = found.shape[1]
        if width < given.shape[1] - 1 or not torch.equal(found, given[:, :width].to(found)):
            return None
        replaced.append(names[module])
        return (shown[:, :width].to(found), *args[1:])

    with observed(names, substitute, before=True):
        yield replaced
