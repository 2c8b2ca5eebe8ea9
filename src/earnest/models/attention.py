"""Attention of one new token per row over cached keys and values, without copies of them for grouped heads.

Where several query heads share a key head, transformers repeats the keys and values for each of them at every token.
Here the query heads of one key head are the rows of one query instead:

    [R, heads, 1, d] → [R, key heads, heads / key heads, d]

A row of the query attends to every key that the mask leaves, so the result is the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from earnest.models.policy import Policy

NAME = "earnest_grouped"


def _attention(
    module: nn.Module,
    query: Float[Tensor, "R h T d"],
    key: Float[Tensor, "R k S d"],
    value: Float[Tensor, "R k S e"],
    attention_mask: Tensor | None,
    **given: Any,
) -> tuple[Float[Tensor, "R T h e"], None]:
    rows, heads, length, width = query.shape
    shared = attention_mask is None or attention_mask.shape[1] == 1
    special = given.get("position_bias") is not None or given.get("softcap") is not None or given.get("cache")
    if length > 1 or heads == key.shape[1] or not shared or special or given.get("dropout"):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **given)
    grouped = query.reshape(rows, key.shape[1], -1, width)
    found = nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=given.get("scaling")
    )
    return found.reshape(rows, 1, heads, -1), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def grouped(policy: Policy) -> Iterator[None]:
    """Inside the block the policy's model computes its attention like this, where it uses torch's on a CPU."""
    config = policy.model.config.get_text_config(decoder=True)
    if policy.device.type != "cpu" or config._attn_implementation != "sdpa":
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
