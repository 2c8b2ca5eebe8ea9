"""How a batch becomes micro-batches: dealt to the ranks, cut, packed or padded."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from earnest.engines import micro
from earnest.engines.mesh import Mesh
from earnest.engines.packing import Packer, why_not
from earnest.models.policy import Policy
from earnest.signals.batch import Batch


class Layouts:
    """Cuts batches for one policy on one mesh. ``pack``: True packs rows, False pads them, None: as it is cheaper."""

    def __init__(self, policy: Policy, mesh: Mesh, pack: bool | None) -> None:
        self.policy, self.mesh, self.pack = policy, mesh, pack

    @cached_property
    def packing(self) -> Packer | str:
        """What packs the rows, or the reason why they are padded."""
        if self.pack is False:
            return "pack is false"
        if self.pack is None and self.policy.device.type == "cpu" and self.policy.dtype.itemsize == 2:
            return "16 bits on a CPU; pack=true packs them"
        return why_not(self.policy) or Packer(self.policy)

    def cut(self, batch: Batch, max_tokens: int, *, same_rows: bool = False) -> list[micro.Micro]:
        """This rank's micro-batches, as many as every other rank's.

        ``same_rows``: a term divides by the tokens of its micro-batch, so packing must not change its rows.
        """
        if self.mesh.size == 1:
            return self._layout(batch, max_tokens, same_rows)
        trees = [] if isinstance(self.packing, str) else self.packing.trees(batch, max_tokens)
        rows = self.mesh.deal(*self.mesh.units(batch, [(t.rows, t.size) for t in trees]))
        parts: list[micro.Micro] = []
        if rows:
            places = batch.tokens_of(rows)
            parts = [replace(p, token=places[p.token]) for p in self._layout(batch.rows(rows), max_tokens, same_rows)]
        most = max(self.mesh.gathered(len(parts)))
        if len(parts) < most:
            first = next(r for r, size in enumerate(batch.sizes) if size)
            spare = parts[-1] if parts else self._layout(batch.rows([first]), max_tokens, same_rows)[0]
            parts += [replace(spare, spare=True)] * (most - len(parts))
        return parts

    def _layout(self, batch: Batch, max_tokens: int, same_rows: bool) -> list[micro.Micro]:
        packer, padded = self.packing, micro.cut(batch, max_tokens)
        if isinstance(packer, str):
            return padded
        one = self.mesh.size > 1  # every rank makes the same number of forward passes
        packed = micro.cut_packed(batch, max_tokens, packer, same_rows=same_rows, one_block=one)
        return packed if self.pack or micro.saves(packed, padded, packer) else padded
