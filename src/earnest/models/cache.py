"""Sequences that grow by one token per step: start from prompts, step, keep some rows.

    buffered   earnest's preallocated keys and values; attention-only architectures. Ragged prompts are padded on the
               left, so a row keeps its relative positions when it gets more padding; rows can be added and replaced.
    dynamic    transformers' own cache; prompts of equal length only: hybrids, recurrent layers
    none       the whole sequence again at every token; equal length only: slow, used as the reference

A test on the model selects the kind for an architecture: cached hidden states must equal uncached ones. A row's hidden
states do not depend on the other rows, up to the rounding of matrix products of other shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from earnest.models.attention import grouped
from earnest.models.decoding import BodyDecoder, find_decoder

if TYPE_CHECKING:
    from earnest.models.policy import Policy

CacheKind = Literal["buffered", "dynamic", "none"]
_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
FIRST_ROOM = 64  # positions after the prompt in a new buffer
_SPARE = 32  # padding columns that are tolerated before they are cut off


class BufferLayer(CacheLayerMixin):
    """Keys and values of one layer, [R, heads, room, width], of which the first ``used`` positions are filled.
    Sliding-window layers also keep all positions: the attention mask applies the window."""

    is_sliding = False

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.used = room, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = self._buffer(key_states), self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, like: Tensor) -> Tensor:
        return like.new_empty(like.shape[0], like.shape[1], self.room, like.shape[3])

    def change(self, how: Callable[[Tensor], Tensor]) -> None:
        """Replace the keys, and the values, by what ``how`` makes of them."""
        assert self.keys is not None and self.values is not None
        self.keys, self.values = how(self.keys), how(self.values)

    def _grown(self, old: Tensor) -> Tensor:
        new = self._buffer(old)
        new[:, :, : self.used] = old[:, :, : self.used]
        return new

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self.used + key_states.shape[-2]
        if end > self.room:
            self.room = max(end, 2 * self.room)
            if self.is_initialized:
                self.change(self._grown)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return -1


@dataclass(frozen=True, eq=False)
class Prefix:
    """The keys and values of the first tokens of a sequence, by layer, each [heads, tokens, width]."""

    tokens: tuple[int, ...]
    layers: list[tuple[Tensor, Tensor]]

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(tensor.numel() * tensor.element_size() for pair in self.layers for tensor in pair)


class Cached:
    """``prompts`` are computed once each; row i continues ``prompts[owner[i]]``. A prompt with a prefix (buffered only)
    is computed from the end of that prefix on. Columns: the prefixes up to ``known``, then what is computed; both end
    on the right."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        owner: Int[Tensor, " R"],
        new: int,
        cache: Cache,
        prefixes: Sequence[Prefix | None] | None = None,
    ) -> None:
        self.policy, self.cache = policy, cache
        self.decoder: BodyDecoder | None = None
        starts = [0 if p is None else len(p.tokens) for p in prefixes or [None] * len(prompts)]
        known = max(starts)
        if known:
            self._fill(prefixes or (), known)
        longest = max(len(prompt) - start for prompt, start in zip(prompts, starts, strict=True))
        ids = torch.full((len(prompts), longest), policy.pad_id, device=policy.device)
        mask = torch.ones(len(prompts), known + longest + new, dtype=torch.bool, device=policy.device)
        for row, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
            rest = prompt[start:]
            ids[row, longest - len(rest) :] = torch.as_tensor(rest, device=policy.device)
            mask[row, : known - start] = False
            mask[row, known : known + longest - len(rest)] = False
        self.ragged = not bool(mask.all())
        self.used = known + longest
        self.mask, self.lengths = mask, mask[:, : self.used].sum(1, keepdim=True)
        positions = (mask[:, : self.used].cumsum(1) - 1).clamp_min_(0)[:, known:]
        self.last = self._forward(ids, positions)
        self.keep(owner)

    def _fill(self, prefixes: Sequence[Prefix | None], known: int) -> None:
        for number, layer in enumerate(_layers(self)):
            like = next(p for p in prefixes if p is not None).layers[number]
            for name, one, part in (("keys", like[0], 0), ("values", like[1], 1)):
                made = one.new_zeros(len(prefixes), one.shape[0], layer.room, one.shape[2])
                for row, prefix in enumerate(prefixes):
                    if prefix is not None:
                        made[row, :, known - len(prefix.tokens) : known] = prefix.layers[number][part]
                setattr(layer, name, made)
            layer.used, layer.is_initialized = known, True

    def prefix(self, slot: int, tokens: tuple[int, ...]) -> Prefix:
        """A copy of the keys and values of one row (buffered only), which has read ``tokens``."""
        read = self.mask[slot, : self.used].nonzero()[:, 0]
        assert len(read) == len(tokens), "the cache has exactly the tokens that were read"
        layers = _layers(self)
        pairs = [(layer.keys, layer.values) for layer in layers]
        return Prefix(
            tokens, [(k[slot][:, read], v[slot][:, read]) for k, v in pairs if k is not None and v is not None]
        )

    def _forward(self, ids: Int[Tensor, "R T"], positions: Int[Tensor, "R T"]) -> Float[Tensor, "R d"]:
        # Without padding the model makes positions and masks itself: cheaper, and correct for every architecture.
        extra: dict[str, Tensor] = {}
        if self.ragged:
            extra["attention_mask"] = self.mask[:, : self.used]
            if self.policy.accepts("position_ids"):  # else they follow from the mask (ALiBi)
                extra["position_ids"] = positions
        with grouped(self.policy) if ids.shape[1] == 1 else nullcontext():
            return self.policy.hidden(ids, past=self.cache, **extra)[:, -1]

    def step(self, tokens: Int[Tensor, " R"]) -> None:
        """Append one token to each sequence."""
        positions = self.lengths
        self.used, self.lengths = self.used + 1, self.lengths + 1
        if self.decoder is not None and self.decoder.usable():
            seen = self.mask[:, : self.used] if self.ragged else None
            self.last = self.decoder(tokens[:, None], positions if self.ragged else positions[:1], _layers(self), seen)
        else:
            self.last = self._forward(tokens[:, None], positions)

    def keep(self, rows: Int[Tensor, " r"]) -> None:
        """Continue with these rows only."""
        self.cache.reorder_cache(rows)  # selects and repeats rows
        self.last, self.mask, self.lengths = self.last[rows], self.mask[rows], self.lengths[rows]


class Uncached:
    """The slow reference without a cache: prompts of equal length, everything computed again."""

    def __init__(self, policy: Policy, prompts: Sequence[Sequence[int]], owner: Int[Tensor, " R"]) -> None:
        self.policy = policy
        self.ids = torch.as_tensor([list(p) for p in prompts], device=policy.device)
        self.last = policy.hidden(self.ids)[:, -1]
        self.keep(owner)

    def step(self, tokens: Int[Tensor, " R"]) -> None:
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)
        self.last = self.policy.hidden(self.ids)[:, -1]

    def keep(self, rows: Int[Tensor, " r"]) -> None:
        self.ids, self.last = self.ids[rows], self.last[rows]


Sequences = Cached | Uncached
"""R growing sequences. ``last`` is the hidden state at the last token of each."""


def start(
    policy: Policy,
    kind: CacheKind,
    prompts: Sequence[Sequence[int]],
    owner: Int[Tensor, " R"],
    new: int,
    prefixes: Sequence[Prefix | None] | None = None,
    *,
    probing: bool = False,
) -> Sequences:
    """Sequences that start with ``prompts`` and grow by up to ``new`` tokens; ``prefixes`` are computed already.
    ``probing``: every step calls the body."""
    if kind == "none":
        return Uncached(policy, prompts, owner)
    config: Any = policy.model.config
    if kind == "dynamic":
        return Cached(policy, prompts, owner, new, DynamicCache(config=config))
    given = max((len(p.tokens) for p in prefixes or () if p is not None), default=0)
    room = given + max(map(len, prompts)) + min(new, FIRST_ROOM)
    layers = [BufferLayer(room) for _ in range(config.get_text_config(decoder=True).num_hidden_layers)]
    made = Cached(policy, prompts, owner, new, Cache(layers=layers), prefixes)
    made.decoder = None if probing else policy.decoder
    return made


def join(first: Cached, second: Cached) -> None:
    """Append the rows of ``second`` to ``first``. Both must be of the buffered kind."""
    used = max(first.used, second.used)
    pads = [(c, used - c.used) for c in (first, second)]
    for ours, theirs in zip(_layers(first), _layers(second), strict=True):
        room = used + _SPARE
        for name in ("keys", "values"):
            old = [getattr(ours, name), getattr(theirs, name)]
            fresh = old[0].new_zeros(sum(o.shape[0] for o in old), old[0].shape[1], room, old[0].shape[3])
            row = 0
            for part, (cached, pad) in zip(old, pads, strict=True):
                fresh[row : row + part.shape[0], :, pad:used] = part[:, :, : cached.used]
                row += part.shape[0]
            setattr(ours, name, fresh)
        ours.used, ours.room = used, room
    width = used + _SPARE
    first.mask = torch.cat([_mask(c, pad, width) for c, pad in pads])
    first.lengths = torch.cat([first.lengths, second.lengths])
    first.last = torch.cat([first.last, second.last])
    first.used = used
    first.ragged = not bool(first.mask.all())


def reuse(first: Cached, slots: Int[Tensor, " r"], second: Cached) -> None:
    """Put the first rows of ``second`` into these rows of ``first``, which have ended. Both are buffered."""
    count = len(slots)
    if second.used > first.used:
        _widen(first, second.used - first.used)
    start, end = first.used - second.used, first.used
    for ours, theirs in zip(_layers(first), _layers(second), strict=True):
        for name in ("keys", "values"):
            getattr(ours, name)[slots, :, start:end] = getattr(theirs, name)[:count, :, : second.used]
    first.mask[slots, :start] = False
    first.mask[slots, start:end] = second.mask[:count, : second.used]
    first.lengths[slots], first.last[slots] = second.lengths[:count], second.last[:count]
    first.ragged = not bool(first.mask.all())


def _widen(cached: Cached, columns: int) -> None:
    """Put this many columns of padding in front of every row."""
    for layer in _layers(cached):
        layer.change(lambda old: torch.nn.functional.pad(old, (0, 0, columns, 0)))
        layer.used, layer.room = layer.used + columns, layer.room + columns
    cached.mask = torch.nn.functional.pad(cached.mask, (columns, 0), value=False)
    cached.used += columns


def trim(cached: Cached) -> None:
    """Cut off columns that are padding in every row, once there are many, and make room in the mask."""
    lead = int(cached.mask[:, : cached.used].any(0).int().argmax())
    if lead > _SPARE:
        for layer in _layers(cached):
            layer.change(lambda old: old[:, :, lead:].clone())
            layer.used, layer.room = layer.used - lead, layer.room - lead
        cached.mask, cached.used = cached.mask[:, lead:], cached.used - lead
        cached.ragged = not bool(cached.mask.all())
    if cached.used + 1 >= cached.mask.shape[1]:
        cached.mask = torch.nn.functional.pad(cached.mask, (0, 2 * _SPARE), value=True)


def _layers(cached: Cached) -> list[BufferLayer]:
    layers: list[Any] = cached.cache.layers
    assert all(isinstance(layer, BufferLayer) for layer in layers), "only buffered caches are joined"
    return layers


def _mask(cached: Cached, pad: int, width: int) -> Tensor:
    mask = torch.nn.functional.pad(cached.mask[:, : cached.used], (pad, 0), value=False)
    return torch.nn.functional.pad(mask, (0, width - mask.shape[1]), value=True)


@torch.no_grad()
def find_kind(policy: Policy) -> CacheKind:
    """The fastest kind whose hidden states equal the uncached ones, on a short probe (ragged for ``buffered``)."""
    if not policy.accepts("past_key_values"):
        return "none"
    config: Any = policy.model.config.get_text_config(decoder=True)
    ids, want = _probe(policy)
    plain = set(getattr(config, "layer_types", None) or ["full_attention"]) <= _PLAIN_LAYERS
    if plain and not getattr(config, "num_kv_shared_layers", None) and _obeys(policy, "buffered", ids, want, [5, 2]):
        return "buffered"
    return "dynamic" if _obeys(policy, "dynamic", ids, want, [5, 5]) else "none"


@torch.no_grad()
def find_fast(policy: Policy) -> BodyDecoder | None:
    """The decoder of this body, if its hidden states equal those of the body on the same probe."""
    made = find_decoder(policy)
    if made is None:
        return None
    ids, want = _probe(policy)
    return made if all(_obeys(policy, "buffered", ids, want, lengths, made) for lengths in ([5, 2], [4, 4])) else None


def _probe(policy: Policy) -> tuple[list[int], Float[Tensor, "T d"]]:
    ids = [(5 * i + 1) % policy.head.weight.shape[0] for i in range(7)]
    return ids, policy.hidden(torch.as_tensor([ids], device=policy.device))[0]


def _obeys(
    policy: Policy,
    kind: CacheKind,
    ids: list[int],
    want: Float[Tensor, "T d"],
    lengths: list[int],
    decoder: BodyDecoder | None = None,
) -> bool:
    """Whether prompts cut at ``lengths``, stepped twice in another order, give the whole sequence's hidden states."""
    order = torch.tensor([1, 0, 1], device=policy.device)
    try:
        rows = start(policy, kind, [ids[:n] for n in lengths], order, 2, probing=True)
        if isinstance(rows, Cached):
            rows.decoder = decoder
        for step in range(2):
            rows.step(torch.as_tensor([ids[lengths[o] + step] for o in order.tolist()], device=policy.device))
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False  # this architecture keeps its state elsewhere
    goal = want[[lengths[o] + 1 for o in order.tolist()]].float()
    room = 0.1 if policy.dtype.itemsize == 2 else 2e-3
    return bool((rows.last.float() - goal).norm() <= room * goal.norm())
