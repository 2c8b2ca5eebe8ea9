"""Packing: the rows of a micro-batch as few long rows without padding, with every common beginning computed once.

    rows        a b c d │ a b c e f │ g h
    packed      a b c d e f g h
    positions   0 1 2 3 3 4 0 1
    attention   each token attends to the earlier tokens of its own row: d and e f to a b c, not to each other
    ends        6 6 6 4 6 6 8 8        token q attends to k where k ≤ q < ends[k]

The packed tokens are the nodes of a tree of rows in depth-first order, so those that attend to a token are neighbours.
The attention is SDPA with a mask, or flex-attention (``engines.flex``).

A causal model gives a token the same hidden state in both layouts, so scalars, loss and gradient are the same, up to
the rounding of products of other shapes. Rows end at their last active token: later tokens have no effect. The
completions of a prompt share the prompt, the two sides of a preference pair share theirs.

Attention costs L² in a packed row of L tokens, so rows share a packed row only while that costs less than it saves:

    cost(L) = L + L²/balance          balance: the length at which attention costs as much as the linear layers

Shapes: R rows, T positions, P packed rows, L positions of each, N active tokens, d width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.adapters import without_adapters
from earnest.engines import flex
from earnest.errors import ConfigError
from earnest.models.quantised import QuantisedLinear
from earnest.signals.batch import Batch

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from earnest.models.policy import Policy

ATTENTION_PRICE = 3.0
"""Seconds of one product in masked attention, in seconds of one in a linear layer. Measured on a CPU: 2 to 4."""
SLACK = 0.03
"""The share of padding that a forward pass accepts before its packed rows are computed in another one."""
SMALL = 512
"""A forward pass with fewer tokens accepts any padding: there the number of kernels decides, not their size."""
WORTH = 0.9
"""Packing by default needs a cost of at most this share of the padded cost."""
Attention = Literal["sdpa", "flex"]
"""Of packed rows: SDPA with a mask of token pairs, or flex-attention."""


@dataclass(frozen=True)
class Tree:
    """Rows in lexicographic order, row i with its first ``shared[i]`` tokens in common with row i - 1."""

    rows: tuple[int, ...]
    shared: tuple[int, ...]
    size: int


@dataclass(frozen=True, eq=False)
class PackedBlock:
    """Packed rows of one forward pass. Without a mask they are plain rows, one to a packed row, padded on the right."""

    inputs: Int[Tensor, "P L"]
    positions: Int[Tensor, "P L"] | None
    mask: Float[Tensor, "P 1 L L"] | BlockMask | None


@dataclass(frozen=True, eq=False)
class Packed:
    """A batch's rows in blocks. ``place`` has the place of every active token among the blocks' states in a row.
    ``computed`` counts the positions that go through the model, ``padding`` those of them that are no token of a
    row."""

    blocks: tuple[PackedBlock, ...]
    place: Int[Tensor, " N"]
    computed: int
    padding: int

    def hidden(self, policy: Policy) -> Float[Tensor, "N d"]:
        """The last hidden states at the batch's active tokens."""
        states = [
            policy.hidden(b.inputs, attention_mask=b.mask, position_ids=b.positions).flatten(0, 1) for b in self.blocks
        ]
        return (states[0] if len(states) == 1 else torch.cat(states))[self.place]


class Packer:
    """Packs batches for one policy. ``balance`` is the length at which attention costs as much as the linear layers.
    ``attention`` is what the masks are made for; ``ran`` names it in a step's ``layout``."""

    def __init__(self, policy: Policy, attention: Attention = "sdpa", ran: str = "") -> None:
        self.attention, self.ran = attention, ran
        self.balance = balance_of(policy)
        self.dtype, self.pad = policy.dtype, policy.pad_id

    def cost(self, rows: int, length: int) -> float:
        """Of ``rows`` rows of ``length`` positions, in tokens of the linear layers."""
        return rows * (length + length * length / self.balance)

    def trees(self, batch: Batch, max_tokens: int) -> list[Tree]:
        """The rows with an active token, grouped by common beginnings into trees of at most ``max_tokens`` tokens."""
        ids, ends = _rows(batch)
        used = [r for r, end in enumerate(ends) if end]
        found: list[Tree] = []
        for row in sorted(used, key=lambda r: ids[r, : ends[r]].astype(">i8").tobytes()):
            length = ends[row]
            if found:
                tree, last = found[-1], found[-1].rows[-1]
                shared = _common(ids[last, : ends[last]], ids[row, :length])
                size = tree.size + length - shared
                apart = self.cost(1, tree.size) + self.cost(1, length)
                if shared and size <= max_tokens and self.cost(1, size) <= apart:
                    found[-1] = Tree((*tree.rows, row), (*tree.shared, shared), size)
                    continue
            found.append(Tree((row,), (0,), length))
        return found

    def pack(self, batch: Batch, max_tokens: int, *, one_block: bool = False) -> Packed:
        """The layout of all rows of ``batch``; with ``one_block`` one forward pass computes it."""
        trees = self.trees(batch, max_tokens)
        layouts = [_grouped(_bins(trees, round(self.balance / 4)), one_block), [[trees]]]
        blocks = min(layouts, key=lambda found: sum(self.cost(len(bins), _length(bins)) for bins in found))
        ids, ends = _rows(batch)
        made, starts = [], 0
        paths: dict[int, np.ndarray] = {}
        for bins in blocks:
            length = _length(bins)
            made.append(self._block(bins, length, ids, ends, starts, paths, batch.device))
            starts += len(bins) * length
        active = np.split(batch.position.cpu().numpy(), np.cumsum(batch.sizes)[:-1])  # by row
        place = np.concatenate([paths[r][own] for r, own in enumerate(active) if len(own)])
        used = sum(t.size for t in trees)
        return Packed(tuple(made), torch.from_numpy(place).to(batch.device), starts, starts - used)

    def _block(
        self,
        bins: Sequence[Sequence[Tree]],
        length: int,
        ids: np.ndarray,
        ends: Sequence[int],
        start: int,
        paths: dict[int, np.ndarray],
        device: torch.device,
    ) -> PackedBlock:
        """One forward pass; the places of each row's tokens, counted from ``start``, are added to ``paths``."""
        inputs = np.full((len(bins), length), self.pad, dtype=np.int64)
        positions = np.zeros((len(bins), length), dtype=np.int64)
        last = np.broadcast_to(np.arange(length) + 1, (len(bins), length)).copy()
        for number, trees in enumerate(bins):
            used = 0
            for tree in trees:
                path = np.empty(0, dtype=np.int64)
                for row, shared in zip(tree.rows, tree.shared, strict=True):
                    new = slice(used, used + ends[row] - shared)
                    path = np.concatenate([path[:shared], np.arange(new.start, new.stop)])
                    inputs[number, new] = ids[row, shared : ends[row]]
                    positions[number, new] = np.arange(shared, ends[row])
                    last[number, path] = new.stop
                    paths[row] = start + number * length + path
                    used = new.stop
        tokens = torch.from_numpy(inputs).to(device)
        if all(len(trees) == 1 and len(trees[0].rows) == 1 for trees in bins):
            return PackedBlock(tokens, None, None)
        seen = torch.from_numpy(last).to(device)
        mask = flex.block_mask(seen) if self.attention == "flex" else flex.dense_mask(seen, self.dtype)
        return PackedBlock(tokens, torch.from_numpy(positions).to(device), mask)


def _rows(batch: Batch) -> tuple[np.ndarray, list[int]]:
    """The input ids, and for each row the number of tokens up to its last active one."""
    ends = np.zeros(len(batch), dtype=np.int64)
    active = batch.active.cpu().numpy()
    np.maximum.at(ends, active[:, 0], active[:, 1] + 1)
    return batch.inputs.cpu().numpy(), ends.tolist()


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """The number of tokens at the beginning that two rows share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def _size(trees: Sequence[Tree]) -> int:
    return sum(t.size for t in trees)


def _length(bins: Sequence[Sequence[Tree]]) -> int:
    return max(_size(trees) for trees in bins)


def _bins(trees: Sequence[Tree], room: int) -> list[list[Tree]]:
    """Trees that share a packed row: first fit, the largest first, up to the size of the largest or ``room``."""
    ordered = sorted(trees, key=lambda t: (-t.size, t.rows))
    room = min(room, ordered[0].size)
    bins: list[list[Tree]] = []
    for tree in ordered:
        fitting = next((b for b in bins if _size(b) + tree.size <= room), None)
        if fitting is None:
            bins.append([tree])
        else:
            fitting.append(tree)
    return bins


def _grouped(bins: list[list[Tree]], one_block: bool) -> list[list[list[Tree]]]:
    """Packed rows of similar length go through one forward pass."""
    ordered = sorted(bins, key=lambda b: -_size(b))
    if one_block:
        return [ordered]
    groups: list[list[list[Tree]]] = []
    for trees in ordered:
        if groups:
            together = [*groups[-1], trees]
            computed = len(together) * _size(together[0])
            if computed - sum(_size(b) for b in together) <= SLACK * computed or computed <= SMALL:
                groups[-1] = together
                continue
        groups.append([trees])
    return groups


def balance_of(policy: Policy) -> float:
    """The length at which masked attention costs as much as the linear layers of the body.

    A token takes 2 operations per weight there, and 4·heads·width per token that it attends to in each layer.
    """
    config: Any = policy.model.config.get_text_config(decoder=True)
    embeddings = {id(p) for m in policy.body.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    weights = sum(p.numel() for p in policy.body.parameters() if p.ndim > 1 and id(p) not in embeddings)
    weights += sum(m.numel for m in policy.body.modules() if isinstance(m, QuantisedLinear))
    heads = getattr(config, "num_attention_heads", None) or 1
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return max(1.0, 2 * weights / (ATTENTION_PRICE * 4 * width * max(1, config.num_hidden_layers)))


def packer_of(policy: Policy, wanted: Attention | None = None) -> Packer | str:
    """What packs rows for this model, after a test on it; or in one sentence why they cannot be packed. ``wanted``
    None: flex-attention on GPUs where it passes the test, SDPA elsewhere."""
    if (reason := why_not_by_config(policy)) is not None:
        return reason
    kind: str = policy.model.config.get_text_config(decoder=True)._attn_implementation
    plain = Packer(policy, "sdpa", "masked eager" if kind == "eager" else "masked sdpa")
    if not _obeys(policy, plain):
        return f"{type(policy.model).__name__} computes packed rows differently from padded ones"
    if wanted == "sdpa" or (wanted is None and policy.device.type != "cuda"):
        return plain
    if (reason := _no_flex(policy, plain)) is None:
        return Packer(policy, "flex", "flex_attention")
    if wanted == "flex":
        raise ConfigError(
            f"engine.packed_attention: flex does not work here: {reason}; set it to sdpa, or leave it out."
        )
    plain.ran += f"; flex_attention: {reason}"
    return plain


def _no_flex(policy: Policy, plain: Packer) -> str | None:
    """Why flex-attention does not compute what SDPA does for this model; None if it does, and then it is installed. The
    test compares the gradients of packed rows by the embeddings of their tokens."""
    kind: str = policy.model.config.get_text_config(decoder=True)._attn_implementation
    if kind not in ("sdpa", flex.NAME) or not policy.model._supports_flex_attn:
        return f"{type(policy.model).__name__} with {kind} attention does not support it"
    want = _probe_gradient(policy, plain)
    before = flex.install(policy)
    try:
        got = _probe_gradient(policy, Packer(policy, "flex"))
    except Exception as error:  # of a compiler, a kernel, or a device that has none
        flex.restore(policy, before)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    apart = float((got - want).norm() / want.norm())
    if apart <= (0.05 if policy.dtype.itemsize == 2 else 1e-3):
        return None
    flex.restore(policy, before)
    return f"its gradient is {apart:.2g} from that of SDPA"


def _probe_gradient(policy: Policy, packer: Packer) -> Float[Tensor, "P L d"]:
    """Of a sum of the base's hidden states for the probe, by the embedding of every token; in float64."""
    found: list[Tensor] = []
    embeddings: Any = policy.model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda _module, _args, out: found.append(out.requires_grad_()))
    try:
        with torch.enable_grad(), without_adapters(policy):
            states = _packed_probe(policy, packer).hidden(policy)
            weights = torch.linspace(-1, 1, states.shape[1], dtype=states.dtype, device=states.device)
            return torch.autograd.grad((states * weights).sum(), found)[0].double()
    finally:
        hook.remove()


def why_not_by_config(policy: Policy) -> str | None:
    """Why rows of this architecture cannot be packed, as far as its config and its forward's arguments show."""
    config: Any = policy.model.config.get_text_config(decoder=True)
    name = type(policy.model).__name__
    for argument in ("attention_mask", "position_ids"):
        if not policy.accepts(argument):
            return f"{name} takes no {argument}"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"{name} has layers other than full attention ({', '.join(sorted(kinds - {'full_attention'}))})"
    window, longest = getattr(config, "sliding_window", None), policy.positions
    if window and getattr(config, "use_sliding_window", True) and (longest is None or window < longest):
        return f"{name} attends to a window of {window} tokens"
    if (kind := config._attn_implementation) not in ("sdpa", "eager", flex.NAME):
        return f"the attention implementation {kind} takes no mask of token pairs; load the model with sdpa"
    return None


def _probe(policy: Policy) -> list[list[int]]:
    """Three short rows, two of which have a common beginning."""
    size = policy.head.weight.shape[0]
    start = [(7 * i + 1) % size for i in range(4)]
    return [[*start, 2 % size, 3 % size], [*start, 5 % size], [(11 * i + 2) % size for i in range(5)]]


def _packed_probe(policy: Policy, packer: Packer) -> Packed:
    """The rows of the probe in one packed row."""
    rows, balance = _probe(policy), packer.balance
    batch = Batch.from_rows([r[:1] for r in rows], [r[1:] for r in rows], device=policy.device)
    packer.balance = 1e6  # everything is shared
    try:
        return packer.pack(batch, 10**6)
    finally:
        packer.balance = balance


@torch.no_grad()
def _obeys(policy: Policy, packer: Packer) -> bool:
    """Whether packed rows with a common beginning give the hidden states of the same rows one by one. The difference
    has to be small against that of rows which see each other, as in a model that ignores the mask."""
    packed = _packed_probe(policy, packer)
    try:
        got = packed.hidden(policy).double()
        leaking = policy.hidden(packed.blocks[0].inputs).flatten(0, 1)[packed.place].double()
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return False
    rows = _probe(policy)
    want = torch.cat([policy.hidden(torch.tensor([r[:-1]], device=policy.device))[0] for r in rows]).double()
    share = 0.3 if policy.dtype.itemsize == 2 else 0.01
    room = share * (leaking - want).norm() + 32 * torch.finfo(policy.dtype).eps * want.norm()
    return bool((got - want).norm() <= room)
