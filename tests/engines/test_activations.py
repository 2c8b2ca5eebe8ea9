"""Activation checkpointing: the same gradient, bit for bit, with less kept for the backward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch

from earnest.engines import LocalEngine
from earnest.engines.sharding import blocks_of
from earnest.models.sampling import SampleSpec
from earnest.objectives import GRPO
from earnest.signals import Batch

Make = Callable[..., LocalEngine]


def kept_bytes(engine: LocalEngine, batch: Batch) -> int:
    """What autograd keeps of a forward pass."""
    found: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        found[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        engine.policy.hidden(batch.inputs)
    return sum(found.values())


def test_the_gradient_is_the_same_and_less_is_kept(make_engine: Make, batch: Batch) -> None:
    plain, saving = make_engine(), make_engine(checkpoint_activations=True)
    want, got = (e.gradients(batch, GRPO()) for e in (plain, saving))
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert kept_bytes(saving, batch) < 0.5 * kept_bytes(plain, batch)


def test_without_a_gradient_nothing_changes(make_engine: Make) -> None:
    engines = [make_engine(dtype=torch.float32, checkpoint_activations=on) for on in (False, True)]
    one, other = (e.sample([[4, 5, 6]], 2, SampleSpec(max_new_tokens=5)) for e in engines)
    assert one == other
    assert len(blocks_of(engines[0].policy.body)) == 2
