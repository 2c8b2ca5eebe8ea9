"""Deal a batch to the ranks, cut it into micro-batches of rows, packed or padded, and join their per-token values.

Packed rows with common beginnings go together, or padded rows of similar length. Micro-batches may have different
sizes; the result does not depend on them, because the objectives divide by the whole batch's counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from earnest.adapters.split import Team
from earnest.engines.mesh import Mesh, deal
from earnest.engines.packing import WORTH, Attention, Packed, Packer, packer_of
from earnest.models.policy import Policy
from earnest.objectives.metrics import merge
from earnest.objectives.needs import Need
from earnest.objectives.view import Field
from earnest.signals.batch import Batch


@dataclass(frozen=True, eq=False)
class Micro:
    """Some rows of a batch, and the places of their active tokens among the whole batch's. ``layout`` is how the model
    computes them; None: as they are, padded to the longest."""

    batch: Batch
    token: Int[Tensor, " n"]
    layout: Packed | None = None
    spare: bool = False
    """Computed so that every rank makes as many passes, and left out of every result."""
    together: Together | None = None
    """The micro-batch that a team of ranks computes, of which these are this rank's rows; None: there is no team."""

    @property
    def computed(self) -> int:
        """The positions that go through the model."""
        if self.together is not None:
            return self.together.part.computed
        return self.batch.inputs.numel() if self.layout is None else self.layout.computed

    @property
    def padding(self) -> int:
        """The computed positions that are no token of a row."""
        if self.together is not None:
            return self.together.part.padding
        return self.computed - sum(self.batch.lengths) if self.layout is None else self.layout.padding


@dataclass(frozen=True, eq=False)
class Together:
    """A micro-batch whose hidden states a team of ranks computes; the head of this rank reads those at ``places``."""

    part: Micro
    places: Int[Tensor, " n"]
    team: Team


def shared(part: Micro, team: Team) -> Micro:
    """This rank's rows of a micro-batch that its team computes: each row's scalars and loss are one rank's."""
    sizes = part.batch.sizes
    active = [r for r, size in enumerate(sizes) if size]
    rows = deal([[r] for r in active], [sizes[r] for r in active], team.count)[team.index]
    spare = part.spare or not rows
    rows = rows or active[:1]
    places = part.batch.tokens_of(rows)
    return Micro(part.batch.rows(rows), part.token[places], part.layout, spare, Together(part, places, team))


@dataclass(eq=False)
class Layouts:
    """Cuts batches for one policy on one mesh. ``pack``: True packs rows, False pads them, None: as it is cheaper.
    ``team``: the ranks that compute the hidden states of a micro-batch together. ``attention``: that of packed rows."""

    policy: Policy
    mesh: Mesh
    pack: bool | None
    team: Team | None = None
    attention: Attention | None = None

    @cached_property
    def packing(self) -> Packer | str:
        """What packs the rows, or the reason why they are padded."""
        if self.pack is False:
            return "pack is false"
        if self.pack is None and self.policy.device.type == "cpu" and self.policy.dtype.itemsize == 2:
            return "16 bits on a CPU; pack=true packs them"
        return packer_of(self.policy, self.attention)

    def cut(self, batch: Batch, max_tokens: int, *, same_rows: bool = False) -> list[Micro]:
        """This rank's micro-batches, as many as every other rank's. ``same_rows``: a term divides by the tokens of its
        micro-batch, so packing must not change its rows."""
        parts = self._of_team(batch, max_tokens, same_rows)
        return parts if self.team is None or self.team.alone else [shared(p, self.team) for p in parts]

    def _of_team(self, batch: Batch, max_tokens: int, same_rows: bool) -> list[Micro]:
        if self.mesh.teams == 1:
            return self._layout(batch, max_tokens, same_rows)
        trees = [] if isinstance(self.packing, str) else self.packing.trees(batch, max_tokens)
        rows = self.mesh.deal(*self.mesh.units(batch, [(t.rows, t.size) for t in trees]))
        parts: list[Micro] = []
        if rows:
            places = batch.tokens_of(rows)
            parts = [replace(p, token=places[p.token]) for p in self._layout(batch.rows(rows), max_tokens, same_rows)]
        most = max(self.mesh.gathered(len(parts)))
        if len(parts) < most:
            first = next(r for r, size in enumerate(batch.sizes) if size)
            spare = parts[-1] if parts else self._layout(batch.rows([first]), max_tokens, same_rows)[0]
            parts += [replace(spare, spare=True)] * (most - len(parts))
        return parts

    def describe(self, parts: Sequence[Micro]) -> str:
        """How these micro-batches are laid out: packed with the attention that ran, or padded with the reason; and
        which way of the vocabulary pass ran if ranks share the head or its rows."""
        why = f" ({self.packing})" if isinstance(self.packing, str) else ""
        ran = "" if isinstance(self.packing, str) else f" ({self.packing.ran})"
        shared = f", base in {self.mesh.shard} shards, head gathered" if self.mesh.shard > 1 else ""
        split = "" if self.team is None else f", layers split over {self.team.count} ranks, head by rows"
        return (f"padded{why}" if any(p.layout is None for p in parts) else f"packed{ran}") + shared + split

    def _layout(self, batch: Batch, max_tokens: int, same_rows: bool) -> list[Micro]:
        packer, padded = self.packing, cut(batch, max_tokens)
        if isinstance(packer, str):
            return padded
        one = self.mesh.teams > 1  # every rank makes the same number of forward passes
        packed = cut_packed(batch, max_tokens, packer, same_rows=same_rows, one_block=one)
        return packed if self.pack or saves(packed, padded, packer) else padded


def cut(batch: Batch, max_tokens: int) -> list[Micro]:
    """Micro-batches of at most ``max_tokens`` padded tokens each (at least one row)."""
    lengths = batch.lengths
    if len(lengths) * max(lengths) <= max_tokens:
        return [_whole(batch)]
    order = sorted(range(len(lengths)), key=lambda r: (-lengths[r], r))
    parts: list[list[int]] = []
    for row in order:
        # The first row of a part is its longest, so it sets the width.
        if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [_part(batch, sorted(rows)) for rows in parts if any(batch.sizes[r] for r in rows)]


def cut_packed(
    batch: Batch, max_tokens: int, packer: Packer, *, same_rows: bool = False, one_block: bool = False
) -> list[Micro]:
    """Micro-batches of at most ``max_tokens`` packed tokens each (at least one row). ``same_rows``: the rows of each
    are those of ``cut``, for terms that divide by the tokens of their micro-batch. ``one_block``: each is one forward
    pass."""
    if same_rows:
        parts = cut(batch, max_tokens)
    else:
        rows: list[int] = []
        parts, size = [], 0
        trees = packer.trees(batch, max_tokens)
        if sum(t.size for t in trees) <= max_tokens:
            parts = [_whole(batch)]
        else:
            for tree in trees:
                if rows and size + tree.size > max_tokens:
                    parts.append(_part(batch, sorted(rows)))
                    rows, size = [], 0
                rows, size = [*rows, *tree.rows], size + tree.size
            parts.append(_part(batch, sorted(rows)))
    return [replace(p, layout=packer.pack(p.batch, max_tokens, one_block=one_block)) for p in parts]


def saves(packed: Sequence[Micro], padded: Sequence[Micro], packer: Packer) -> bool:
    """Whether packing is worth it: clearly cheaper than padding."""
    shapes = [b.inputs.shape for p in packed if p.layout is not None for b in p.layout.blocks]
    cost = sum(packer.cost(*shape) for shape in shapes)
    return cost <= WORTH * sum(packer.cost(*p.batch.inputs.shape) for p in padded)


def _whole(batch: Batch) -> Micro:
    return Micro(batch, torch.arange(batch.active.shape[0], device=batch.device))


def _part(batch: Batch, rows: Sequence[int]) -> Micro:
    return Micro(batch.rows(rows), batch.tokens_of(rows))


def join(parts: Sequence[tuple[Tensor, Mapping[Need, Field]]], total: int) -> dict[Need, Field]:
    """The whole batch's scalars from those of its micro-batches, each with the places of its tokens."""
    whole: dict[Need, Field] = {}
    for need, first in parts[0][1].items():
        place = torch.cat([_whole_place(token, fields[need]) for token, fields in parts])
        values = torch.cat([fields[need].values for _, fields in parts])
        order = torch.argsort(place)
        at = None if all(f[need].at is None for _, f in parts) and len(place) == total else place[order]
        metrics = merge([fields[need].metrics or {} for _, fields in parts])
        whole[need] = replace(first, values=values[order], at=at, metrics=metrics)
    return whole


def slice_like(field: Field, micro: Micro, weights: Tensor, at: Tensor | None, total: int) -> Tensor:
    """The part of ``weights``, which cover the tokens ``at`` of ``total``, that belongs to this ``field``."""
    place = torch.full((total,), -1, dtype=torch.long, device=micro.token.device)
    at = torch.arange(total, device=place.device) if at is None else at
    place[at] = torch.arange(at.shape[0], device=place.device)
    return weights[place[_whole_place(micro.token, field)]]


def _whole_place(token: Int[Tensor, " n"], field: Field) -> Int[Tensor, " m"]:
    return token if field.at is None else token[field.at]
