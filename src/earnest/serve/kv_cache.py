"""KV caches of a growing batch: two caches are joined into one, and unused padding is cut off.

Rows are padded on the left, so a row keeps its relative positions when it gets more padding in front. A row's
hidden states do not depend on the other rows (up to the rounding of matrix products of other shapes).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from earnest.models.cache import BufferLayer, Cached

SPARE = 32  # padding columns that are tolerated before they are cut off


def join(first: Cached, second: Cached) -> None:
    """Append the rows of ``second`` to ``first``. Both must be of the buffered kind."""
    used = max(first.used, second.used)
    pads = [(c, used - c.used) for c in (first, second)]
    for ours, theirs in zip(_layers(first), _layers(second), strict=True):
        room = used + SPARE
        for name in ("keys", "values"):
            old = [getattr(ours, name), getattr(theirs, name)]
            fresh = old[0].new_zeros(sum(o.shape[0] for o in old), old[0].shape[1], room, old[0].shape[3])
            row = 0
            for part, (cached, pad) in zip(old, pads, strict=True):
                fresh[row : row + part.shape[0], :, pad:used] = part[:, :, : cached.used]
                row += part.shape[0]
            setattr(ours, name, fresh)
        ours.used, ours.room = used, room
    width = used + SPARE
    first.mask = torch.cat([_mask(c, pad, width) for c, pad in pads])
    first.lengths = torch.cat([first.lengths, second.lengths])
    first.last = torch.cat([first.last, second.last])
    first.used = used
    first.ragged = not bool(first.mask.all())


def trim(cached: Cached) -> None:
    """Cut off columns that are padding in every row, once there are many, and make room in the mask."""
    lead = int(cached.mask[:, : cached.used].any(0).int().argmax())
    if lead > SPARE:
        for layer in _layers(cached):
            for name in ("keys", "values"):
                setattr(layer, name, getattr(layer, name)[:, :, lead:].clone())
            layer.used, layer.room = layer.used - lead, layer.room - lead
        cached.mask, cached.used = cached.mask[:, lead:], cached.used - lead
        cached.ragged = not bool(cached.mask.all())
    if cached.used + 1 >= cached.mask.shape[1]:
        cached.mask = torch.nn.functional.pad(cached.mask, (0, 2 * SPARE), value=True)


def _layers(cached: Cached) -> list[BufferLayer]:
    layers: list[Any] = cached.cache.layers
    assert all(isinstance(layer, BufferLayer) for layer in layers), "only buffered caches are joined"
    return layers


def _mask(cached: Cached, pad: int, width: int) -> Tensor:
    mask = torch.nn.functional.pad(cached.mask[:, : cached.used], (pad, 0), value=False)
    return torch.nn.functional.pad(mask, (0, width - mask.shape[1]), value=True)
