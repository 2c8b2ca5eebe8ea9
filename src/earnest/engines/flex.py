"""Flex-attention (arXiv 2412.05496) for packed rows: the model skips the blocks of token pairs that no row has.

A model that ``install`` has changed computes with flex-attention where the mask is a ``BlockMask``, and with SDPA
elsewhere, so padded rows, scoring and sampling are computed as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from earnest.models.policy import Policy

NAME = "earnest_flex"


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any) -> Any:
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if attention_mask is None or isinstance(attention_mask, Tensor):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    return flex_attention_forward(module, query, key, value, attention_mask, **given)


def install(policy: Policy) -> str:
    """The model computes like this from now on. Returns the name of its attention until now, for ``restore``."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    config = policy.model.config.get_text_config(decoder=True)
    before: str = config._attn_implementation
    config._attn_implementation = NAME
    return before


def restore(policy: Policy, before: str) -> None:
    """The model has the attention that it had before ``install``."""
    policy.model.config.get_text_config(decoder=True)._attn_implementation = before


def block_mask(ends: Int[Tensor, "P L"]) -> BlockMask:
    """Token q of a packed row attends to k where k ≤ q < ends[k]."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, length = ends.shape
    return create_block_mask(
        lambda row, head, q, k: (q >= k) & (q < ends[row, k]), rows, None, length, length, device=str(ends.device)
    )


def dense_mask(ends: Int[Tensor, "P L"], dtype: torch.dtype) -> Float[Tensor, "P 1 L L"]:
    """The same mask as numbers that are added to the scores: 0, or the smallest number of the dtype."""
    places = torch.arange(ends.shape[1], device=ends.device)
    q, k = places[:, None], places[None, :]
    sees = (q >= k) & (q < ends[:, None, :])
    mask = torch.zeros(sees.shape, dtype=dtype, device=ends.device)
    return mask.masked_fill_(~sees, torch.finfo(dtype).min)[:, None]
