"""Changes the token ids that a model embeds apart from those that the loss reads: a token as an input and as a target.

Found by value: an ``nn.Embedding`` of the model that is called with the batch's ids, or with all but their last column.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit.restore import observed


@contextmanager
def embedded(model: nn.Module, given: Tensor, shown: Tensor) -> Iterator[list[str]]:
    """Inside, where an embedding is called with the ids ``given`` [B, T] it embeds ``shown`` [B, T] instead; yields the
    names of the embeddings that were."""
    replaced: list[str] = []
    names = {module: name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}

    def substitute(module: nn.Embedding, args: tuple[Any, ...]) -> Any:
        found = args[0] if args and isinstance(args[0], Tensor) else None
        if found is None or found.ndim != 2 or found.is_floating_point() or found.shape[0] != given.shape[0]:
            return None
        width = found.shape[1]
        if width not in (given.shape[1], given.shape[1] - 1) or not torch.equal(found, given[:, :width].to(found)):
            return None
        replaced.append(names[module])
        return (shown[:, :width].to(found), *args[1:])

    with observed(names, substitute, before=True):
        yield replaced
