"""A divergence on K tokens and the rest of the vocabulary, by tiles: every row at once, a few columns at a time.

    m ← max(m, max_v z_v) - 60    e_v = e^(z_v - m)    a ← a·e^(m_old - m) + Σ_v e_v·z'_v·W_v    r = Σ_{v∉K} e_v
    ∂D/∂h = Σ_{v∈K} (c_v - (c_tail/r)·e_v)·z'_v·W_v + (c_tail/r)·a

with c = ∂D/∂(log-odds of the K tokens and the bucket) and z' = ∂z/∂(h·W). The side that chooses the K tokens comes
first and keeps the highest logits so far; the others of a tile are added to the rest. The other side then uses the same
tokens. So a top-K divergence costs two products forward and one back, without a row of logits.

For α > 0, c_tail is of the size of the student's tail, so c_tail/r is bounded. A forward KL (α = 0) can have a finite
slope on a vanishing tail, where the difference above would cancel, so ``sweep`` computes it by rows. ``sweep`` also
computes a blended source, whose logits need the student's.
Shapes: n rows, K tokens of the support, d width, V vocabulary, v columns of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.engines.vocabulary import tiled
from earnest.engines.vocabulary.product import PlainHead
from earnest.engines.vocabulary.support import VocabularyComparison, cut_to, on_support
from earnest.engines.vocabulary.tiled import Tiles
from earnest.objectives.needs import Divergence
from earnest.signals.distributions import Distribution, FullLogits, Hidden, TopK

HEADROOM = 60.0
"""The highest logit is scaled to e^60, so that float32 holds a rest of e^-147 of it."""
GATHER_BYTES = 16 * 2**20


def takes(need: Divergence, source: Distribution, vocabulary: int) -> Hidden | TopK | None:
    """The source, if this file can compute ``need`` with it, else None; ``sweep`` can compute every need."""
    if isinstance(source, FullLogits) or need.alpha == 0 or need.blend is not None:
        return None
    k = source.ids.shape[1] if isinstance(source, TopK) else need.top_k
    return source if need.support != "full" and k is not None and k < vocabulary else None


def divergence(
    hidden: Float[Tensor, "M d"],
    source: Hidden | TopK,
    head: PlainHead,
    need: Divergence,
    *,
    slope: bool,
    budget_bytes: int,
) -> tuple[VocabularyComparison, Float[Tensor, "M d"] | None]:
    """The comparison on all rows; with ``slope`` also its derivative by the states."""
    M = hidden.shape[0]
    rows, columns = tiled.sizes(hidden, head, budget_bytes)
    tiles = tiled.Tiles(head, columns, need.temperature)
    parts, slopes = [], []
    for start in range(0, max(M, 1), rows):  # ``ran`` is set even without a row
        part = slice(start, min(M, start + rows))
        if isinstance(source, TopK):
            theirs: Tensor | TopK = source.take(part)
        else:
            theirs = head.scaled(source.states[part])
        found, by_states = _rows(head.scaled(hidden[part]), theirs, tiles, need, slope=slope)
        parts.append(found)
        slopes.append(by_states)
    return _joined(parts), torch.cat([s for s in slopes if s is not None]) if slope else None


def _rows(
    states: Float[Tensor, "n d"], source: Float[Tensor, "n d"] | TopK, tiles: Tiles, need: Divergence, *, slope: bool
) -> tuple[VocabularyComparison, Float[Tensor, "n d"] | None]:
    if not states.shape[0]:  # nothing to compare, but ``ran`` is set
        K = source.ids.shape[1] if isinstance(source, TopK) and need.top_k is None else need.top_k
        assert K is not None
        nothing = states.new_zeros(0, K + 1)
        ids = torch.zeros(0, K, dtype=torch.long, device=states.device)
        return on_support(nothing, nothing, ids, need, slope=slope, received=isinstance(source, TopK)), states
    head, tau = tiles.head, need.temperature
    pulls = slope and need.tail != "renormalise"  # what is renormalised has no slope outside K
    if isinstance(source, TopK):
        ids, teacher = cut_to(source, need.top_k)
        own = _known(states, tiles, ids, pulls=pulls)
        grouped = own.grouped()
    else:
        assert need.top_k is not None
        if need.support == "student":
            own = _chosen(states, tiles, need.top_k, pulls=pulls)
            theirs = _known(source, tiles, own.ids, pulls=False)
        else:
            theirs = _chosen(source, tiles, need.top_k, pulls=False)
            own = _known(states, tiles, theirs.ids, pulls=pulls)
        ids, grouped = own.ids, own.grouped()
        # The two sides add the rest in different orders. Equal states must give equal numbers and a value of exactly 0.
        same = (states == source).all(1, keepdim=True)
        teacher = torch.where(same, grouped, theirs.grouped())
    teacher = teacher.to(states.dtype).log_softmax(-1)
    found = on_support(grouped, teacher, ids, need, slope=slope, received=isinstance(source, TopK))
    if not slope:
        return found, None
    assert found.categories is not None
    K = ids.shape[1]
    by_logit = found.categories[:, :K].clone()
    if own.pulled is not None:
        tail = found.categories[:, K:] / own.rest[:, None]
        by_logit.addcmul_(tail, (own.kept - own.shift[:, None]).exp(), value=-1)
        own.pulled.mul_(tail)
    by_states = torch.zeros_like(states) if own.pulled is None else own.pulled
    if head.softcap is not None:
        by_logit.mul_(1 - (own.kept * (tau / head.softcap)).square())
    step = max(1, GATHER_BYTES // (K * states.shape[1] * states.dtype.itemsize))
    for some in torch.arange(states.shape[0], device=ids.device).split(step):
        tokens = head.weight.detach()[ids[some]].to(states.dtype)
        by_states[some] += torch.bmm(by_logit[some, None], tokens)[:, 0]
    return found, by_states.mul_(head.scale / tau)


@dataclass(eq=False)
class _Side:
    """One side's logits at temperature: the K kept ones, and the others as ``rest``·e^``shift``."""

    ids: Int[Tensor, "n K"]
    kept: Float[Tensor, "n K"]
    rest: Float[Tensor, " n"]
    shift: Float[Tensor, " n"]
    pulled: Float[Tensor, "n d"] | None  # Σ_v e^(z_v - shift)·z'_v·W_v

    def grouped(self) -> Float[Tensor, "n C"]:
        return torch.cat([self.kept, (self.shift + self.rest.log())[:, None]], -1)


class _Rest:
    """The sums over the tokens outside the support, tile by tile."""

    def __init__(self, states: Float[Tensor, "n d"], *, pulls: bool) -> None:
        n = states.shape[0]
        self.shift = states.new_full((n,), torch.finfo(states.dtype).min)
        self.rest = states.new_zeros(n)
        self.pulled = torch.zeros_like(states) if pulls else None

    def add(
        self, z: Float[Tensor, "n v"], weight: Tensor, softcap: float | None, inside: tuple[Tensor, Tensor]
    ) -> None:
        """Add a tile of logits, whose memory is overwritten; those ``inside`` the support go into ``pulled`` only."""
        slopes = None
        if self.pulled is None:
            z[inside] = float("-inf")
        elif softcap is not None:
            slopes = torch.div(z, softcap).square_().neg_().add_(1)
        fade = self._raise(z)
        e = z.sub_(self.shift[:, None]).exp_()
        if self.pulled is None:
            self.rest.add_(e.sum(1))
            return
        held = e[inside]
        e[inside] = 0
        self.rest.add_(e.sum(1))
        e[inside] = held
        if slopes is not None:
            e.mul_(slopes)
        self.pulled.mul_(fade[:, None]).addmm_(e, weight)

    def fall(self, z: Float[Tensor, "n E"]) -> None:
        """Add logits that are no longer inside the support; ``pulled`` already contains them."""
        if z.shape[1]:
            fade = self._raise(z)
            self.rest.add_((z - self.shift[:, None]).exp_().sum(1))
            if self.pulled is not None:
                self.pulled.mul_(fade[:, None])

    def _raise(self, z: Float[Tensor, "n v"]) -> Float[Tensor, " n"]:
        above = torch.maximum(self.shift, z.amax(1) - HEADROOM)
        fade = torch.sub(self.shift, above).exp_()
        self.rest.mul_(fade)
        self.shift = above
        return fade

    def side(self, ids: Int[Tensor, "n K"], kept: Float[Tensor, "n K"]) -> _Side:
        if self.pulled is not None:
            self.rest.clamp_(min=torch.finfo(self.rest.dtype).tiny)
        return _Side(ids, kept, self.rest, self.shift, self.pulled)


class _Highest:
    """The K highest logits of a row so far. Higher logits are queued until there are enough of them to sort."""

    def __init__(self, n: int, K: int, like: Tensor) -> None:
        self.K, self.seen = K, 0
        self.values = like.new_empty(n, 0)
        self.ids = torch.empty(n, 0, dtype=torch.long, device=like.device)
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []

    def see(self, z: Float[Tensor, "n v"], start: int) -> tuple[Tensor, Tensor]:
        """Rows and columns of the tile that are inside the support so far."""
        full = self.values.shape[1] == self.K
        better = z > self.values[:, -1:] if full else torch.ones_like(z, dtype=torch.bool)
        rows, columns = better.nonzero(as_tuple=True)
        self.waiting.append((rows, columns + start, z[rows, columns]))
        return rows, columns

    @property
    def due(self) -> bool:
        return self.values.shape[1] < self.K or sum(len(v) for _, _, v in self.waiting) > self.values.numel()

    def settle(self) -> Float[Tensor, "n E"]:
        """Choose the K highest among the queued logits; returns the others, padded with -inf."""
        rows, ids, values = (torch.cat(parts) for parts in zip(*self.waiting, strict=True))
        self.waiting = []
        n, have = self.values.shape
        counts = torch.bincount(rows, minlength=n)
        order = rows.argsort(stable=True)
        rows = rows[order]
        place = have + torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        width = have + int(counts.max()) if n else have
        everything = self.values.new_full((n, width), float("-inf"))
        tokens = self.ids.new_zeros(n, width)
        everything[:, :have], tokens[:, :have] = self.values, self.ids
        everything[rows, place], tokens[rows, place] = values[order], ids[order]
        # Stable: with fewer than K possible tokens, an impossible token (-inf) still comes before the padding.
        everything, by = everything.sort(dim=1, descending=True, stable=True)
        self.values = everything[:, : self.K].clone()
        self.ids = tokens.gather(1, by[:, : self.K])
        return everything[:, self.K :]


def _chosen(states: Float[Tensor, "n d"], tiles: Tiles, K: int, *, pulls: bool) -> _Side:
    """The side whose K highest logits are the support."""
    rest, highest = _Rest(states, pulls=pulls), _Highest(states.shape[0], K, states)
    for part, weight, z in tiles.of(states):
        rest.add(z, weight, tiles.cap, highest.see(z, part.start))
        if highest.due:
            rest.fall(highest.settle())
    if highest.waiting:
        rest.fall(highest.settle())
    return rest.side(highest.ids, highest.values)


def _known(states: Float[Tensor, "n d"], tiles: Tiles, ids: Int[Tensor, "n K"], *, pulls: bool) -> _Side:
    """The side that uses the support of the other side."""
    rest, K = _Rest(states, pulls=pulls), ids.shape[1]
    kept = states.new_empty(ids.shape)
    by_id, order = ids.flatten().sort()
    for part, weight, z in tiles.of(states):
        here = slice(*torch.searchsorted(by_id, by_id.new_tensor([part.start, part.stop])).tolist())
        rows, places = order[here] // K, by_id[here] - part.start
        kept.view(-1)[order[here]] = z[rows, places]
        rest.add(z, weight, tiles.cap, (rows, places))
    return rest.side(ids, kept)


def _joined(parts: list[VocabularyComparison]) -> VocabularyComparison:
    if len(parts) == 1:
        return parts[0]
    masses = [(p.student_mass, p.teacher_mass) for p in parts]
    return VocabularyComparison(
        torch.cat([p.value for p in parts]),
        parts[0].ran,
        student_mass=torch.cat([s for s, _ in masses if s is not None]),
        teacher_mass=torch.cat([t for _, t in masses if t is not None]),
    )
