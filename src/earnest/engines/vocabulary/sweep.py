"""The loop over chunks of tokens: the logits once per chunk, then all needs on them, block by block.

A *chunk* has as many rows as the memory budget holds logits for, because matrix products are faster with many rows. A
*block* has as many rows as fit into the processor's cache, for elementwise operations. Derivatives overwrite logits
that are no longer needed.
Shapes: N tokens, M covered ones, n rows of a chunk, b of a block, d width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.engines.vocabulary import tiled, tiled_support
from earnest.engines.vocabulary.kernels import Block, block
from earnest.engines.vocabulary.plan import Plan, TokenNeed
from earnest.engines.vocabulary.product import PlainHead, Product
from earnest.engines.vocabulary.scratch import Scratch
from earnest.objectives.needs import DistributionSource, Divergence, LogProb, SourceEntropy
from earnest.signals.distributions import FullLogits, Hidden, TopK

CHUNK_BYTES = 320 * 2**20  # more rows than this holds do not make a product faster
BLOCK_BYTES = 2**20  # a processor's cache
ACCELERATOR_BLOCK_BYTES = 32 * 2**20  # few large launches instead


@dataclass(eq=False)
class Found:
    """A need's values on all its tokens, filled chunk by chunk. ``by_hidden`` is ∂value/∂h."""

    values: Tensor
    by_hidden: Float[Tensor, "M d"] | None = None
    ran: str = ""
    student_mass: Tensor | None = None
    teacher_mass: Tensor | None = None

    def put(self, rows: slice, part: Block) -> None:
        self.values[rows] = part.value
        self.ran = part.ran
        if part.student_mass is not None and part.teacher_mass is not None:
            if self.student_mass is None or self.teacher_mass is None:
                self.student_mass, self.teacher_mass = torch.zeros_like(self.values), torch.zeros_like(self.values)
            self.student_mass[rows], self.teacher_mass[rows] = part.student_mass, part.teacher_mass


@dataclass(eq=False)
class _Chunk:
    """The rows [start, stop) of the tokens, and the memory that is used for them."""

    start: int
    stop: int
    z: Float[Tensor, "n V"]
    spare: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows of a chunk that a source covers: ``place`` among the source's tokens, ``local`` within the chunk
    (None: all of it)."""

    place: slice
    local: Int[Tensor, " m"] | None
    source: Float[Tensor, "m V"] | TopK | None

    def __len__(self) -> int:
        return self.place.stop - self.place.start


class Sweep:
    """One plan on one head; ``values`` and ``pull`` are its passes. ``targets`` are [N] or [N, K]."""

    def __init__(
        self, todo: Plan, product: Product, targets: Int[Tensor, "N ..."], *, vocabulary: int, budget_bytes: int
    ) -> None:
        self.todo, self.product, self.targets, self.V = todo, product, targets, vocabulary
        self.dtype = product.dtype
        self.budget_bytes = budget_bytes
        # Needs that read a source first, source by source; what needs the policy's logits alone comes last and may
        # overwrite them.
        order: tuple[DistributionSource | None, ...] = ("teacher", "reference", None)
        self.groups = {s: [n for n in todo.needs if _source(n) == s] for s in order}
        self.groups = {s: needs for s, needs in self.groups.items() if needs}

    def values(self, hidden: Float[Tensor, "N d"], *, derive: bool = False) -> dict[TokenNeed, Found]:
        """All scalars; with ``derive`` also the derivative of each by the hidden state."""
        if (alone := self._alone(hidden, slope=derive)) is not None:
            return alone
        found = self._empty()
        sloped: list[TokenNeed] = [
            n for needs in self.groups.values() for n in needs if derive and not isinstance(n, SourceEntropy)
        ]
        for need in sloped:
            found[need].by_hidden = torch.empty(
                found[need].values.shape[0], hidden.shape[1], dtype=self.dtype, device=hidden.device
            )
        homes = {n: self._home(n, sloped) for n in sloped}
        blocks = 1 + max(self._source_blocks(), int("source" in homes.values())) + int("spare" in homes.values())
        for chunk in self._chunks(hidden, blocks=blocks):
            for source, needs in self.groups.items():
                rows = self._rows(chunk, source)
                for need in needs:
                    if need not in homes or not len(rows):
                        self._each_block(chunk, rows, need, found[need], slope=False)
                    else:
                        home = self._memory(chunk, homes[need], rows)
                        self._each_block(chunk, rows, need, found[need], slope=True, sink=_writer(home))
                        states = hidden[chunk.start : chunk.stop]
                        states = states if rows.local is None else states[rows.local]
                        by_hidden = found[need].by_hidden
                        assert by_hidden is not None
                        by_hidden[rows.place] = self.product.pull(states, home, None)
        return found

    def pull(
        self, hidden: Float[Tensor, "N d"], weights: Mapping[TokenNeed, Tensor], into: list[Tensor]
    ) -> Float[Tensor, "N d"]:
        """Σ_k weight_k · ∂scalar_k/∂h; the head's own derivatives are added to ``into``."""
        by_hidden = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
        groups = {s: mine for s, needs in self.groups.items() if (mine := [n for n in needs if n in weights])}
        if not groups:
            return by_hidden
        alone = sum(map(len, groups.values())) == 1 and None in groups
        for chunk in self._chunks(hidden, blocks=1 + self._source_blocks() + (not alone)):
            rows = self._rows(chunk, None)
            total = chunk.z if alone else self._memory(chunk, "spare", rows).zero_()
            for source, needs in groups.items():
                rows = self._rows(chunk, source)
                for need in needs:
                    weight = weights[need][rows.place]
                    sink = _writer(total) if alone else _adder(total, rows)
                    self._each_block(chunk, rows, need, None, slope=True, sink=sink, weight=weight)
            states = hidden[chunk.start : chunk.stop]
            by_hidden[chunk.start : chunk.stop] = self.product.pull(states, total, into or None)
        return by_hidden

    def _alone(self, hidden: Float[Tensor, "N d"], *, slope: bool) -> dict[TokenNeed, Found] | None:
        """The need by tiles of the vocabulary, if it is the only one and it and the head can be cut into tiles."""
        if len(self.todo.needs) != 1 or not isinstance(self.product, PlainHead):
            return None
        (need,), head = self.todo.needs, self.product
        if isinstance(need, LogProb):
            ids = self.targets if self.targets.ndim == 2 else self.targets[:, None]
            values, by_hidden = tiled.logprobs(
                hidden, head, ids, need.temperature, slope=slope, budget_bytes=self.budget_bytes
            )
            return {need: Found(values.view(self.targets.shape), by_hidden, "logprob")}
        if isinstance(need, Divergence):
            covered = self.todo.sources[need.source]
            if (source := tiled_support.takes(need, covered.distribution, self.V)) is not None:
                mine = hidden if covered.at is None else hidden[covered.at]
                found, by_hidden = tiled_support.divergence(
                    mine, source, head, need, slope=slope, budget_bytes=self.budget_bytes
                )
                return {need: Found(found.value, by_hidden, found.ran, found.student_mass, found.teacher_mass)}
        return None

    def _chunks(self, hidden: Float[Tensor, "N d"], *, blocks: int) -> Iterator[_Chunk]:
        """Chunks of nearly equal size, with their logits."""
        N, row = hidden.shape[0], self.V * self.dtype.itemsize
        most = max(1, min(self.budget_bytes // (blocks * row), CHUNK_BYTES // row))
        size = -(-N // -(-N // most))
        on_cpu = hidden.device.type == "cpu"
        # One thread sums a row, so fewer rows than threads would leave threads idle.
        least, most_bytes = (torch.get_num_threads(), BLOCK_BYTES) if on_cpu else (1, ACCELERATOR_BLOCK_BYTES)
        self._block_rows = block_rows = max(least, most_bytes // row)
        self._scratch = Scratch(min(block_rows, size) * self.V, self.dtype, hidden.device)
        z = torch.empty(size, self.V, dtype=self.dtype, device=hidden.device)
        spare: dict[str, Tensor] = {}
        for start in range(0, N, size):
            stop = min(N, start + size)
            self.product.logits(hidden[start:stop], z[: stop - start])
            yield _Chunk(start, stop, z[: stop - start], spare)

    def _memory(self, chunk: _Chunk, home: str, rows: _Rows) -> Float[Tensor, "m V"]:
        """Memory for the slopes of the covered rows: the source's logits, the policy's logits, or a separate block."""
        if home == "own":
            return chunk.z
        if home not in chunk.spare:
            chunk.spare[home] = torch.empty_like(chunk.z)
        return chunk.spare[home][: len(rows)]

    def _home(self, need: TokenNeed, sloped: Sequence[TokenNeed]) -> str:
        """The memory for a need's slopes: logits that no later need reads."""
        source = _source(need)
        later = sloped[sloped.index(need) + 1 :]
        if source is not None and isinstance(self.todo.sources[source].distribution, Hidden):
            if not any(_source(n) == source for n in self.groups[source][self.groups[source].index(need) + 1 :]):
                return "source"
        elif not later and self.todo.at(need) is None:
            return "own"
        return "spare"

    def _source_blocks(self) -> int:
        return int(any(isinstance(c.distribution, Hidden) for c in self.todo.sources.values()))

    def _empty(self) -> dict[TokenNeed, Found]:
        found = {}
        for need in self.todo.needs:
            source = _source(need)
            count = self.targets.shape[0] if source is None else len(self.todo.sources[source].distribution)
            shape = self.targets.shape if isinstance(need, LogProb) else (count,)
            found[need] = Found(torch.zeros(shape, dtype=self.dtype, device=self.targets.device))
        return found

    def _rows(self, chunk: _Chunk, source: DistributionSource | None) -> _Rows:
        """The covered rows of this chunk, with the source's logits for them."""
        if source is None:
            return _Rows(slice(chunk.start, chunk.stop), None, None)
        covered = self.todo.sources[source]
        place, local = slice(chunk.start, chunk.stop), None
        if covered.at is not None:
            bounds = torch.searchsorted(
                covered.at, torch.tensor([chunk.start, chunk.stop], device=covered.at.device)
            ).tolist()
            place = slice(*bounds)
            if place.stop - place.start < chunk.stop - chunk.start:
                local = covered.at[place] - chunk.start
        rows = _Rows(place, local, None)
        match covered.distribution:
            case Hidden(states):
                z = self._memory(chunk, "source", rows)
                if len(rows):
                    self.product.logits(states[place], z)
                return _Rows(place, local, z)
            case FullLogits(z):
                return _Rows(place, local, z[place])
            case TopK() as top:
                return _Rows(place, local, top.take(place))

    def _each_block(
        self,
        chunk: _Chunk,
        rows: _Rows,
        need: TokenNeed,
        found: Found | None,
        *,
        slope: bool,
        sink: Callable[[slice, Tensor], None] | None = None,
        weight: Tensor | None = None,
    ) -> None:
        # A source that covers no row here still runs, on an empty block, because ``ran`` comes from the code that ran.
        for start in range(0, max(1, len(rows)), self._block_rows):
            part = slice(start, min(len(rows), start + self._block_rows))
            self._scratch.clear()
            z = chunk.z[part] if rows.local is None else chunk.z[rows.local[part]]
            at = slice(rows.place.start + part.start, rows.place.start + part.stop)
            # A log-prob reads every row, so places are tokens.
            targets = self.targets[at] if isinstance(need, LogProb) else None
            own = None if weight is None else weight[part]
            source = _cut(rows.source, part, self.dtype)
            answer = block(need, z, targets, source, slope=slope, weight=own, out=self._scratch)
            if found is not None:
                found.put(at, answer)
            if sink is not None:
                assert answer.slope is not None
                self.product.chain(z, answer.slope)
                sink(part, answer.slope)


def _source(need: TokenNeed) -> DistributionSource | None:
    return need.source if isinstance(need, Divergence | SourceEntropy) else None


def _cut(source: Tensor | TopK | None, part: slice, dtype: torch.dtype) -> Tensor | TopK | None:
    if isinstance(source, TopK):
        return source.take(part)
    return None if source is None else source[part].to(dtype)


def _writer(home: Float[Tensor, "m V"]) -> Callable[[slice, Tensor], None]:
    def write(part: slice, slope: Tensor) -> None:
        home[part] = slope

    return write


def _adder(total: Float[Tensor, "n V"], rows: _Rows) -> Callable[[slice, Tensor], None]:
    def add(part: slice, slope: Tensor) -> None:
        if rows.local is None:
            total[part] += slope
        else:
            total.index_add_(0, rows.local[part], slope)

    return add
