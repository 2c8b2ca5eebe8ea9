"""A model and its adapter with fake tensors: the real code runs on them and allocates nothing.

The peak grows by the same number of bytes with every equal layer, so a deep model runs with 2 and 3 of its layers:

    peak(L) = peak(2) + (L - 2) · (peak(3) - peak(2))
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from earnest.adapters.attach import mounted_empty
from earnest.engines.activations import checkpoint_activations
from earnest.engines.sharding import blocks_of
from earnest.models.head import read_head
from earnest.models.policy import Policy
from earnest.models.quantised import Kind, count_parameters, quantise
from earnest.models.quiet import quiet

if TYPE_CHECKING:
    from earnest.config.schema import AdapterConfig

FEW = 4
"""Models with at most this many layers run with all of them."""


@dataclass(frozen=True)
class PassSize:
    """One forward pass of a micro-batch: ``rows`` rows of ``length`` tokens; packed rows need a mask of token pairs."""

    rows: int
    length: int
    masked: bool = False

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True)
class Traced:
    """Bytes that a micro-batch keeps for its backward pass, and the most that exist at one time."""

    kept: int
    peak: int


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators allocate inside the block, until they are freed. Tensors in ``known`` and
    their views are not counted."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {t.untyped_storage()._cdata for t in known}
        self._counted: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return found

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or key in self._counted:
            return
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        self._counted[key] = weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self.now -= size
        self._counted.pop(key, None)


class Shape:
    """The model of ``config`` in ``dtype`` with an adapter, as fake tensors. ``eager``: use plain attention, as the
    policy does in 16 bits on a CPU."""

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        adapter: AdapterConfig,
        *,
        eager: bool = False,
        quantised: Kind | None = None,
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.mode = FakeTensorMode()
        with self.mode, quiet():
            how: dict[str, Any] = {"attn_implementation": "eager"} if eager else {}
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **how).eval().requires_grad_(False)
            if quantised is not None:
                quantise(model, quantised)
            self.policy = Policy(model, None, "", "", torch.device("cpu"), dtype)
            # A real policy tests its head on values and reads the pad id from the tokenizer; here are neither.
            self.policy.__dict__ |= {"head": read_head(model), "pad_id": 0}
            self.weights = [*model.parameters(), *model.buffers()]
            self.blocks = blocks_of(self.policy.body)
            self.block_bytes = [bytes_of([*b.parameters(), *b.buffers()]) for b in self.blocks]
            self.parameters = count_parameters(model)
            self.adapter = mounted_empty(
                model, adapter.build(), adapter.targets, adapter.layers, adapter.modules_to_save
            )
            cut = {id(p): p for s in self.adapter.slots.values() if s.replaces for p in s.parameters()}
            # of modules with offsets, which are sharded with the base
            self.trained_whole = bytes_of(list(cut.values()))
            self.block_trained = [bytes_of([p for p in b.parameters() if id(p) in cut]) for b in self.blocks]

    @property
    def vocabulary(self) -> int:
        return int(self.policy.head.weight.shape[0])

    @property
    def width(self) -> int:
        return int(self.policy.head.weight.shape[1])

    def trace(
        self, passes: Sequence[PassSize], tokens: int, *, checkpointed: bool = False, again: bool = False
    ) -> Traced:
        """Run forward and backward of one micro-batch with ``tokens`` active tokens. ``again``: gradients of an earlier
        micro-batch exist already."""

        def run(live: LiveBytes) -> int:
            states = [self._states(p) for p in passes]
            place = torch.zeros(tokens, dtype=torch.long)
            active = (states[0] if len(states) == 1 else torch.cat(states))[place]
            del states
            kept = live.now
            active.backward(torch.zeros(tokens, self.width).to(active.dtype))
            return kept

        with ExitStack() as undo:
            if checkpointed:
                checkpoint_activations(self.policy.body)
                for block in self.blocks:
                    undo.callback(block.__dict__.pop, "forward")
            return self._extrapolated(run, again)

    def trace_forward(self, size: PassSize) -> Traced:
        """Run a forward pass without a gradient."""

        def run(_: LiveBytes) -> int:
            with torch.no_grad():
                state = self._states(size)
            return state.numel() * state.element_size()

        return self._extrapolated(run)

    def cache_bytes(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        from transformers.cache_utils import DynamicCache

        def run(_: LiveBytes) -> int:
            cache = DynamicCache(config=self.policy.model.config)
            with torch.no_grad():
                self.policy.hidden(torch.zeros(1, 4, dtype=torch.long), past=cache)
            pairs = [(x.keys, x.values) for x in cache.layers if getattr(x, "is_initialized", False)]
            return sum(bytes_of([t for t in pair if t is not None]) for pair in pairs) // 4

        return self._extrapolated(run).kept

    def _states(self, size: PassSize) -> Tensor:
        ids = torch.zeros(size.rows, size.length, dtype=torch.long)
        if not size.masked:
            return self.policy.hidden(ids).flatten(0, 1)
        mask = torch.zeros(size.rows, 1, size.length, size.length, dtype=self.policy.dtype)
        return self.policy.hidden(ids, attention_mask=mask, position_ids=ids).flatten(0, 1)

    def _extrapolated(self, run: Callable[[LiveBytes], int], again: bool = False) -> Traced:
        parameters = self.adapter.parameters()
        held = [*self.weights, *self.adapter.named_tensors().values()]

        def measured(depth: int) -> Traced:
            with self._depth(depth), self.mode:
                for p in parameters:
                    p.grad = torch.zeros_like(p) if again else None
                gradients = [p.grad for p in parameters if p.grad is not None]
                with LiveBytes([*held, *gradients]) as live:
                    kept = run(live)
            for p in parameters:
                p.grad = None
            return Traced(kept, live.peak)

        depth = len(self.blocks)
        # layers of one class with the same shapes of parameters need the same memory
        kinds = {(type(b), *((n, tuple(p.shape)) for n, p in b.named_parameters())) for b in self.blocks}
        if depth <= FEW or len(kinds) > 1:
            return measured(depth)
        two, three = measured(2), measured(3)
        return Traced(
            two.kept + (depth - 2) * (three.kept - two.kept), two.peak + (depth - 2) * (three.peak - two.peak)
        )

    @contextmanager
    def _depth(self, depth: int) -> Iterator[None]:
        """Inside the block the model has only its first ``depth`` layers."""
        holder = next(m for m in self.policy.body.modules() if isinstance(m, nn.ModuleList) and list(m) == self.blocks)
        every = dict(holder._modules)
        holder._modules = dict(list(every.items())[:depth])
        try:
            yield
        finally:
            holder._modules = every


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """The bytes of these tensors; shared ones count once."""
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())
