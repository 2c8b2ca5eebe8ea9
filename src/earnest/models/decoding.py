"""One more token of every row through a Llama-like body, without the calls between transformers' modules.

With a small model or few rows these calls take longer than the products: per layer about fifteen modules, each with a
look at its hooks, and the choice of an attention. Here a step is the same operations in the same order, so its hidden
states are those of the model, bit for bit. Linear layers, norms and embeddings with an adapter, a hook or another class
run as modules. A body whose blocks have a hook or another forward (steering, compiling, shards) runs as a whole: then
``usable`` is false.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

if TYPE_CHECKING:
    from earnest.models.cache import BufferLayer
    from earnest.models.policy import Policy

_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")  # transformers' names; their blocks differ in biases and key norms


class BodyDecoder:
    """The blocks of a policy's body for one token per row; ``find_decoder`` makes it."""

    def __init__(self, body: Any, norm: type[nn.Module]) -> None:
        self.body, self.norm = body, norm
        self.blocks = [_Block(layer, norm) for layer in body.layers]
        inner = [m for layer in body.layers for m in (layer, layer.self_attn, layer.mlp)]
        self._replaced = [(m, type(m)) for m in (body, *inner)]

    def usable(self) -> bool:
        """Whether the modules that a step does not call have no hooks and their own forward."""
        return not torch_module._has_any_global_hook() and all(
            type(m) is kind and not m._forward_hooks and not m._forward_pre_hooks and "forward" not in m.__dict__
            for m, kind in self._replaced
        )

    def __call__(
        self,
        tokens: Int[Tensor, "R 1"],
        positions: Int[Tensor, "r 1"],
        layers: Sequence[BufferLayer],
        mask: Bool[Tensor, "R S"] | None,
    ) -> Float[Tensor, "R d"]:
        """Hidden states at the tokens, after the final norm. ``positions``: one for each row, or one for all (r = 1);
        ``layers`` are extended; ``mask``: the columns that each row sees, with the new one; None: all."""
        body = self.body
        x = body.embed_tokens(tokens)
        cos, sin = (t[:, None] for t in body.rotary_emb(x, position_ids=positions))
        half = cos.shape[-1] // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), -1)  # (-b) sin = b (-sin), exactly
        seen = None if mask is None else mask[:, None, None]
        for block, layer in zip(self.blocks, layers, strict=True):
            x = block(x, cos, sin, layer, seen)
        return _norm(body.norm, x, self.norm)[:, 0]


class _Block:
    """A block: attention with rotated queries and keys over grouped heads, then a gated MLP."""

    def __init__(self, layer: Any, norm: type[nn.Module]) -> None:
        own, mlp = layer.self_attn, layer.mlp
        self.norm, self.width, self.scale = norm, own.head_dim, own.scaling
        self.first, self.second = layer.input_layernorm, layer.post_attention_layernorm
        self.q, self.k, self.v, self.o = own.q_proj, own.k_proj, own.v_proj, own.o_proj
        self.q_norm, self.k_norm = getattr(own, "q_norm", None), getattr(own, "k_norm", None)
        self.gate, self.up, self.down, self.act = mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, layer: BufferLayer, mask: Tensor | None) -> Tensor:
        rows, width = x.shape[0], self.width
        h = _norm(self.first, x, self.norm)
        q = _linear(self.q, h).view(rows, -1, 1, width)
        k = _linear(self.k, h).view(rows, -1, 1, width)
        v = _linear(self.v, h).view(rows, -1, 1, width)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _norm(self.q_norm, q, self.norm), _norm(self.k_norm, k, self.norm)
        heads, groups = q.shape[1], k.shape[1]
        both = torch.cat((q, k), 1)
        both = (both * cos).add_(both.roll(width // 2, -1).mul_(sin))
        keys, values = layer.update(both[:, heads:], v)
        found = nn.functional.scaled_dot_product_attention(
            both[:, :heads].reshape(rows, groups, -1, width), keys, values, attn_mask=mask, scale=self.scale
        )
        x = x + _linear(self.o, found.reshape(rows, 1, -1))
        h = _norm(self.second, x, self.norm)
        return x + _linear(self.down, self.act(_linear(self.gate, h)) * _linear(self.up, h))


def _linear(module: nn.Module, x: Tensor) -> Tensor:
    if type(module) is nn.Linear and _bare(module):
        return nn.functional.linear(x, cast(Tensor, module._parameters["weight"]), module._parameters["bias"])
    return cast(Tensor, module(x))


def _norm(module: nn.Module, x: Tensor, kind: type[nn.Module]) -> Tensor:
    if type(module) is kind and _bare(module):
        room = cast(float, module.variance_epsilon)
        return nn.functional.rms_norm(x, (x.shape[-1],), module._parameters["weight"], room)
    return cast(Tensor, module(x))


def _bare(module: nn.Module) -> bool:
    return not module._forward_hooks and not module._forward_pre_hooks and "forward" not in module.__dict__


def find_decoder(policy: Policy) -> BodyDecoder | None:
    """The decoder of a policy whose body has these blocks, in float32 on a CPU with torch's attention; else None."""
    body: Any = policy.body
    config = policy.model.config.get_text_config(decoder=True)
    family = type(body).__name__.removesuffix("Model")
    plain = policy.device.type == "cpu" and policy.dtype == torch.float32 and config._attn_implementation == "sdpa"
    if family not in _FAMILIES or not plain or not policy.can_resume:
        return None
    home = sys.modules[type(body).__module__]
    kinds = {part: getattr(home, family + part, None) for part in ("Model", "DecoderLayer", "Attention", "MLP")}
    found = [(body, "Model")]
    for layer in body.layers:
        found += [(layer, "DecoderLayer"), (layer.self_attn, "Attention"), (layer.mlp, "MLP")]
    norm = getattr(home, f"{family}RMSNorm", None)
    if norm is None or not home.__name__.startswith("transformers.") or any(type(m) is not kinds[k] for m, k in found):
        return None
    return BodyDecoder(body, norm)
