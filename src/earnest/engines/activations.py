"""Activation checkpointing (arXiv 1604.06174): a layer keeps its inputs, and the backward pass computes it again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from earnest.engines.sharding import blocks_of


def checkpoint_activations(body: nn.Module) -> None:
    """Every layer of ``body`` does so from now on where a gradient is needed; elsewhere it runs as before."""
    for block in blocks_of(body):
        block.forward = _checkpointed(block.forward)


def _checkpointed(plain: Any) -> Any:
    def _forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, use_reentrant=False, **kwargs)

    return _forward
