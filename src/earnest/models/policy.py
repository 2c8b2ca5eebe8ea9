"""A policy: a causal LM with its tokenizer, and the methods that the rest of earnest uses."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from earnest.errors import UnusableModel
from earnest.models.head import HeadSpec, check_head, read_head
from earnest.models.quantised import QuantisedLinear, count_parameters
from earnest.models.speech import Speech

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

    from earnest.models.cache import CacheKind
    from earnest.models.decoding import BodyDecoder

__all__ = ["SHARDED", "HeadSpec", "Policy"]

SHARDED = "earnest_sharded_body"
"""The method of a sharded model that gathers the weights around the body's forward."""


@dataclass(eq=False)
class Policy(Speech):
    """``name`` and ``version`` identify the weights; ``notes`` are remarks from loading them.

    ``parameters`` is the number of parameters of the base, with tied ones counted once.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    version: str
    device: torch.device
    dtype: torch.dtype
    notes: tuple[str, ...] = ()
    parameters: int = field(init=False)
    _base_names: tuple[str, ...] = field(init=False, repr=False)
    _fingerprint: str | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        # Adapters add their own tensors to the model later; the base is its present state.
        self._base_names = tuple(self.model.state_dict(keep_vars=True))
        self.parameters = count_parameters(self.model)

    @classmethod
    def of(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, name: str = "", version: str = "unversioned"
    ) -> Policy:
        """Wrap a model that is already in memory: set to eval, its parameters frozen, its head checked."""
        model.eval().requires_grad_(False)
        parameter = next(model.parameters())
        # In 16 bits torch's fused CPU attention rounds one query with a cache differently from a whole sequence: at
        # logits of 46 sampled and scored log-probs differ by 0.06 nats in bf16. With plain attention they were measured
        # equal to 2e-6 in bf16 and to 2e-3 in fp16.
        if parameter.device.type == "cpu" and parameter.dtype.itemsize == 2:
            model.set_attn_implementation("eager")
        policy = cls(model, tokenizer, name or type(model).__name__, version, parameter.device, parameter.dtype)
        _ = policy.head
        return policy

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        return eos_ids(self.tokenizer, getattr(self.model, "generation_config", None))

    @property
    def positions(self) -> int | None:
        """The longest sequence in tokens that the model reads; None if it declares no limit."""
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        return int(limit) if limit else None

    @property
    def body(self) -> nn.Module:
        """The model without its head."""
        body = self.model.base_model
        if body is self.model:
            raise UnusableModel(
                f"{type(self.model).__name__} does not separate its body from its head; load the …ForCausalLM class."
            )
        return body

    @cached_property
    def _inputs(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.body.forward).parameters)

    def accepts(self, name: str) -> bool:
        """Whether the body's forward names this argument (one that falls into ``**kwargs`` may be ignored)."""
        return name in self._inputs

    def hidden(
        self,
        input_ids: Int[Tensor, "R T"],
        *,
        attention_mask: Tensor | BlockMask | None = None,
        position_ids: Int[Tensor, "R T"] | None = None,
        past: Cache | None = None,
    ) -> Float[Tensor, "R T d"]:
        """Last hidden states, after the final norm. ``past`` is read and extended in place."""
        extra = {"attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": past}
        extra = {k: v for k, v in extra.items() if v is not None}
        for name in extra:
            if not self.accepts(name):
                raise UnusableModel(f"{type(self.model).__name__} takes no {name}; leave it out for this architecture.")
        if self.accepts("use_cache"):
            extra["use_cache"] = past is not None
        body = getattr(self.model, SHARDED, self.body)
        return body(input_ids=input_ids, **extra)[0]

    @cached_property
    def head(self) -> HeadSpec:
        """The output layer, checked against the model's own logits at first use."""
        head = read_head(self.model)
        ids = (torch.arange(4, device=self.device) % head.weight.shape[0])[None]
        with torch.no_grad():
            hidden = self.hidden(ids)
        check_head(self.model, head, hidden, ids)
        return head

    @cached_property
    def cache_kind(self) -> CacheKind:
        """The cache kind for sampling with this architecture; tested on a probe at first use."""
        from earnest.models.cache import find_kind

        return find_kind(self)

    @cached_property
    def can_resume(self) -> bool:
        """Whether a prompt can be computed from a prefix on. The columns of such a row have gaps, which only positions
        and masks of full attention ignore."""
        config: Any = self.model.config.get_text_config(decoder=True)
        windowed = bool(getattr(config, "sliding_window", None))
        types = getattr(config, "layer_types", None) or (["sliding_attention"] if windowed else ["full_attention"])
        return self.cache_kind == "buffered" and set(types) == {"full_attention"} and self.accepts("position_ids")

    @cached_property
    def decoder(self) -> BodyDecoder | None:
        """A step of the body without the calls between its modules, where it gives the body's hidden states."""
        from earnest.models.cache import find_fast

        return find_fast(self)

    @property
    def precision(self) -> str:
        """How the linear layers are stored: ``int8``, ``nf4``, or the model's dtype."""
        kinds = (m.kind for m in self.model.modules() if isinstance(m, QuantisedLinear))
        return next(kinds, str(self.dtype).removeprefix("torch."))

    def fingerprint(self, *, fresh: bool = False) -> str:
        """sha256 over the base's tensors: names, shapes, dtypes, bytes. Cached; ``fresh`` reads the weights again."""
        if self._fingerprint is None or fresh:
            self._fingerprint = _digest(self.model.state_dict(keep_vars=True), self._base_names)
        return self._fingerprint

    def describe(self) -> str:
        """One line: weights, size, device and dtype, with the reason for the device."""
        size = f"{self.parameters / 1e6:.2f} M" if self.parameters < 1e9 else f"{self.parameters / 1e9:.2f} G"
        what = f"{type(self.model).__name__}, {size} parameters, {self.precision} on {self.device}"
        line = f"{self.name} ({self.version}): {what}"
        return "; ".join([line, *self.notes])


def eos_ids(tokenizer: PreTrainedTokenizerBase, generation: object) -> frozenset[int]:
    """Every id that ends a turn: the tokenizer's eos and the generation config's."""
    found = getattr(generation, "eos_token_id", None)
    ids = list(found) if isinstance(found, (list, tuple)) else [found]
    return frozenset(int(i) for i in [tokenizer.eos_token_id, *ids] if i is not None)


def _digest(state: Mapping[str, Tensor], names: Iterable[str]) -> str:
    total, seen = hashlib.sha256(), set()
    for name in names:
        if name not in state:
            raise UnusableModel(
                f"The base tensor {name} is no longer in the model; a fingerprint needs the model as it was loaded."
            )
        tensor = state[name].detach()
        where = (tensor.data_ptr(), tuple(tensor.shape))
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if tensor.numel() and where not in seen:  # tied tensors are hashed once
            seen.add(where)
            total.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
