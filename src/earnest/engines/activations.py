"""Activation checkpointing (arXiv 1604.06174): a layer keeps its inputs, and the backward pass computes it again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from earnest.adapters.split import Team
from earnest.engines.sharding import blocks_of


def checkpoint_activations(body: nn.Module, team: Team | None = None) -> None:
    """Every layer of ``body`` does so from now on where a gradient is needed; elsewhere it runs as before. ``team``:
    the ranks that share the layers."""
    how: dict[str, Any] = {"use_reentrant": False} | ({} if team is None else {"context_fn": team.again})
    for block in blocks_of(body):
        block.forward = _checkpointed(block.forward, how)


def _checkpointed(plain: Any, how: dict[str, Any]) -> Any:
    def _forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, **how, **kwargs)

    return _forward
