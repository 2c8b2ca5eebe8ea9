"""``View``: one term's sight of a batch, flat over the n active tokens of its roles, with the reductions that terms share.

Shapes: N active tokens of the batch, n of the view, S sequences (rows with a token in the view), P preference pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from earnest.errors import SignalError
from earnest.objectives.needs import Need
from earnest.signals.batch import Batch, Counts, Role


@dataclass(frozen=True, eq=False)
class Field:
    """A scalar's values for the active tokens ``at`` (None: for all N, in order), and what computed them."""

    values: Tensor
    at: Int[Tensor, " M"] | None = None
    ran: str = ""
    metrics: Mapping[str, Any] | None = None


Scalars = Mapping[Need, Field]


@dataclass(frozen=True, eq=False)
class View:
    """Tokens ``index`` (into the batch's active tokens) as one term sees them."""

    batch: Batch
    scalars: Scalars
    index: Int[Tensor, " n"]
    counts: Counts
    state: Mapping[str, Any]
    label: str

    @classmethod
    def of(
        cls, batch: Batch, scalars: Scalars, roles: Sequence[Role], counts: Counts, state: Mapping[str, Any], label: str
    ) -> View:
        index = batch.has_role(roles)[batch.row].nonzero()[:, 0]
        return cls(batch, scalars, index, counts, state, label)

    def __len__(self) -> int:
        return self.index.shape[0]

    def keep(self, mask: Tensor) -> View:
        """The sub-view of the tokens where ``mask`` [n] is True. The counts stay the whole batch's."""
        return replace(self, index=self.index[mask])

    def covered(self, need: Need) -> View:
        """The sub-view of the tokens for which this scalar exists (a teacher may cover only some rows)."""
        at = self.scalars[need].at
        if at is None:
            return self
        has = torch.zeros(self.batch.active.shape[0], dtype=torch.bool, device=at.device)
        has[at] = True
        return self.keep(has[self.index])

    # --- values -----------------------------------------------------------------------------------------------------

    def scalar(self, need: Need) -> Tensor:
        """The scalar's values for exactly these tokens, with its graph."""
        field = self.scalars[need]
        if field.at is None:
            return field.values[self.index]
        place = torch.full((self.batch.active.shape[0],), -1, dtype=torch.long, device=self.index.device)
        place[field.at] = torch.arange(field.at.shape[0], device=self.index.device)
        mine = place[self.index]
        if bool((mine < 0).any()):
            raise SignalError(f"{self.label}: {need} covers only a part of the tokens; take view.covered(need) first.")
        return field.values[mine]

    def ran(self, need: Need) -> str:
        """What computed this scalar, in its own words."""
        return self.scalars[need].ran

    @property
    def row(self) -> Int[Tensor, " n"]:
        return self.batch.row[self.index]

    @property
    def weight(self) -> Float[Tensor, " n"]:
        return self.batch.token_weight[self.index]

    @property
    def advantages(self) -> Float[Tensor, " n"]:
        assert self.batch.advantages is not None, "check() demands it"
        return self.batch.advantages[self.index]

    @property
    def behaviour(self) -> Float[Tensor, " n"]:
        assert self.batch.behaviour is not None, "check() demands it"
        return self.batch.behaviour[self.index]

    @property
    def reference(self) -> Float[Tensor, " n"]:
        """log π₀(target) of the reference policy."""
        assert self.batch.reference is not None and self.batch.reference.logprobs is not None, "check() demands it"
        return self.batch.reference.logprobs[self.index]

    # --- sequences --------------------------------------------------------------------------------------------------

    @cached_property
    def _sequences(self) -> tuple[Int[Tensor, " S"], Int[Tensor, " n"]]:
        rows, segment = torch.unique(self.row, return_inverse=True)
        return rows, segment

    @property
    def rows(self) -> Int[Tensor, " S"]:
        """The batch rows that have a token here."""
        return self._sequences[0]

    @property
    def segment(self) -> Int[Tensor, " n"]:
        """For each token, which of ``rows`` it belongs to."""
        return self._sequences[1]

    def row_sum(self, values: Float[Tensor, " n"]) -> Float[Tensor, " S"]:
        """Σ over a row's tokens (unweighted; multiply by ``weight`` first where that is meant)."""
        return torch.zeros(len(self.rows), dtype=values.dtype, device=values.device).index_add(0, self.segment, values)

    def row_mean(self, values: Float[Tensor, " n"]) -> Float[Tensor, " S"]:
        """Weighted mean over each row's tokens."""
        weight = self.weight.to(values.dtype)
        return self.row_sum(values * weight) / self.row_sum(weight)

    # --- reductions to one number, by the whole batch's counts --------------------------------------------------------

    def token_mean(self, values: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        """Σ w·x / (all weights of the whole batch)."""
        return (values * self.weight.to(values.dtype)).sum() / self.counts.tokens

    def sequence_mean(self, values: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        """Mean over the whole batch's sequences of each one's token mean."""
        return self.row_mean(values).sum() / self.counts.sequences

    def pairs(self) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"]]:
        """Places in ``rows`` of the chosen and the rejected row of every pair, pair by pair."""
        places: dict[int, dict[str, int]] = {}
        for place, row in enumerate(self.rows.tolist()):
            pair, role = int(self.batch.pair[row]), self.batch.role[row]
            if pair < 0 or role in places.setdefault(pair, {}):
                raise SignalError(f"{self.label}: row {row} ({role}) has pair {pair}; every pair id joins one chosen and one rejected row.")
            places[pair][role] = place
        for pair, members in places.items():
            if set(members) != {"chosen", "rejected"}:
                raise SignalError(f"{self.label}: pair {pair} has only {sorted(members)}; every pair needs a chosen and a rejected row.")
        device = self.index.device
        order = sorted(places)
        chosen = torch.tensor([places[p]["chosen"] for p in order], device=device)
        rejected = torch.tensor([places[p]["rejected"] for p in order], device=device)
        return chosen, rejected
