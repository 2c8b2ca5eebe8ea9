"""Estimates of the work and communication of one step.

    forward    2 operations per weight and token                     P·2·t
    backward   2 by the inputs of each layer; 2 more by the weights if they are trained
    recompute  one more forward pass, with checkpointed activations
    sampling   2 per weight and new token; each decoded token reads all weights once from memory

Attention is left out, because it is small compared with the linear layers for rows of a few thousand tokens. Of a
mixture of experts only the experts that a token uses are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from earnest.config.schema import RunConfig
from earnest.plan.memory import Device
from earnest.plan.shape import Shape, bytes_of
from earnest.plan.workload import Workload

TFLOPS, LINK = 300.0, 50e9
"""Assumed: operations per second of a GPU in 16 bits (×10¹²), bytes per second that a device sends and receives."""
MEMORY_BANDWIDTH = 2e12
"""Assumed: bytes per second that a GPU reads from its memory."""


@dataclass(frozen=True)
class Paper:
    """Per step and device: operations, bytes sent, seconds of computing, sampling and communication."""

    tokens: int
    operations: float
    sent: int
    computing: float
    sampling: float
    sending: float


def paper(
    shape: Shape, config: RunConfig, work: Workload, device: Device, tflops: float = TFLOPS, link: float = LINK
) -> Paper:
    """Estimate a step at the given speed (TFLOP/s) and bandwidth (bytes/s); a real step is slower."""
    engine, layout = config.engine, work.layout(shape, config, device)
    ranks = engine.ranks
    used = active_weights(shape)
    trains_weights = shape.adapter.replaces
    passes = 2 + 2 + (2 if trains_weights else 0) + (2 if engine.checkpoint_activations else 0)
    reads = {"reference.logprobs", "reference.distribution", "proximal", "teacher"} & config.build_objective().signals()
    operations = used * layout.computed * (passes + 2 * len(reads))
    base, trained = bytes_of(shape.weights), bytes_of(shape.adapter.parameters())
    share = (engine.shard - 1) / engine.shard
    gathers = layout.count * (2 + len(reads)) + (1 if work.samples_here else 0)
    summed = 2 * trained * (ranks - 1) / ranks  # an all-reduce of whole gradients
    if trains_weights and engine.shard > 1:  # offsets are gathered with the base; gradients become shards
        summed = trained * share * (gathers + layout.count)
    sent = round(base * share * gathers + summed)
    rows = -(-work.rows // ranks) if work.samples_here else 0
    decode = max(rows * used * 2 / (tflops * 1e12), base / MEMORY_BANDWIDTH if rows else 0.0)
    return Paper(
        work.rows * work.row_tokens,
        float(operations),
        sent,
        operations / (tflops * 1e12),
        work.completion * decode if work.samples_here else 0.0,
        sent / link,
    )


def active_weights(shape: Shape) -> int:
    """The number of weights that compute on a token: all but the input embedding, and only the experts that it uses."""
    model = shape.policy.model
    text: Any = model.config.get_text_config(decoder=True)
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    chosen = getattr(text, "num_experts_per_tok", None)
    total = shape.parameters
    if not shape.policy.head.tied:
        total -= shape.vocabulary * shape.width
    if experts and chosen:
        inside = sum(
            p.numel() for name, p in model.named_parameters() if ".experts." in name and "earnest_slots" not in name
        )
        total -= round(inside * (1 - chosen / experts))
    return total
