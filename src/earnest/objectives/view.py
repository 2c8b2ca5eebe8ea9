"""``View``: the part of a batch that one term reads, flat over the n active tokens of its roles, with shared
reductions.

Shapes: N active tokens of the batch, n of the view, S sequences (rows with a token in the view), P preference pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from earnest.errors import SignalError
from earnest.objectives.needs import LogProb, Need, SpectralNorm
from earnest.signals.batch import Batch, Counts
from earnest.signals.distributions import check_logprobs


@dataclass(frozen=True, eq=False)
class Field:
    """A scalar's values for the active tokens ``at`` (None: for all N, in order), and what computed them.

    For a divergence it also has the name, and whether it is exact or sampled.
    """

    values: Tensor
    at: Int[Tensor, " M"] | None = None
    ran: str = ""
    metrics: Mapping[str, Any] | None = None
    divergence: str | None = None
    estimator: Literal["exact", "sampled"] | None = None


Scalars = Mapping[Need, Field]


@dataclass(frozen=True, eq=False)
class View:
    """The tokens of one term: ``index`` into the batch's active tokens."""

    batch: Batch
    scalars: Scalars
    index: Int[Tensor, " n"]
    counts: Counts
    state: Mapping[str, Any]
    label: str

    @classmethod
    def of(
        cls,
        batch: Batch,
        scalars: Scalars,
        tokens: Bool[Tensor, " N"],
        counts: Counts,
        state: Mapping[str, Any],
        label: str,
    ) -> View:
        return cls(batch, scalars, tokens.nonzero()[:, 0], counts, state, label)

    def __len__(self) -> int:
        return self.index.shape[0]

    def keep(self, mask: Tensor) -> View:
        """The sub-view of the tokens where ``mask`` [n] is True. The counts stay the whole batch's."""
        return replace(self, index=self.index[mask])

    def scalar(self, need: Need) -> Tensor:
        """The scalar's values for exactly these tokens, with its graph.

        Raise if shape or values do not fit the need.
        """
        field = self.field(need)
        N = self.batch.active.shape[0]
        covered = N if field.at is None else field.at.shape[0]
        wide = isinstance(need, LogProb) and self.batch.targets.ndim == 3
        expected = (covered, self.batch.targets.shape[2]) if wide else (covered,)
        if tuple(field.values.shape) != expected:
            raise SignalError(
                f"{self.label}: {need} must have shape {list(expected)}, got {list(field.values.shape)}; nothing is "
                "broadcast."
            )
        if field.at is None:
            values = field.values[self.index]
        else:
            place = torch.full((N,), -1, dtype=torch.long, device=self.index.device)
            place[field.at] = torch.arange(covered, device=self.index.device)
            mine = place[self.index]
            if bool((mine < 0).any()):
                raise SignalError(
                    f"{self.label}: {need} is missing for {int((mine < 0).sum())} of the {len(self)} tokens that it "
                    "reads."
                )
            values = field.values[mine]
        return self._checked(need, values)

    def field(self, need: Need) -> Field:
        if need not in self.scalars:
            raise SignalError(f"{self.label}: the engine did not return {need}, which the term needs.")
        return self.scalars[need]

    def per_module(self, need: SpectralNorm) -> Float[Tensor, " L"]:
        """A scalar that belongs to the adapted modules, not to tokens."""
        values = self.field(need).values
        if values.ndim != 1 or values.numel() == 0:
            raise SignalError(
                f"{self.label}: {need} must have shape [L], one value per adapted module, got {list(values.shape)}."
            )
        return self._checked(need, values)

    def _checked(self, need: Need, values: Tensor) -> Tensor:
        if not bool(torch.isfinite(values).all()):
            raise SignalError(
                f"{self.label}: {need} has {int((~torch.isfinite(values)).sum())} values that are not finite."
            )
        if isinstance(need, LogProb):
            check_logprobs(f"{self.label}: {need}", values.detach())
        return values if values.dtype == torch.float64 else values.float()  # bf16 is too coarse for sums

    def computed(self, needs: Iterable[Need]) -> tuple[str | None, str | None]:
        """(the divergences among these needs, how they were computed), as the functions that computed them describe
        it."""
        found = [f for need in needs if (f := self.scalars.get(need)) is not None and f.divergence is not None]
        names = dict.fromkeys(f.divergence or "" for f in found)
        return " + ".join(names) or None, " + ".join(dict.fromkeys(f.estimator or "" for f in found)) or None

    def ran(self, need: Need) -> str:
        """The description of the computation of this scalar."""
        return self.field(need).ran

    @property
    def row(self) -> Int[Tensor, " n"]:
        return self.batch.row[self.index]

    @property
    def weight(self) -> Float[Tensor, "n ..."]:
        return self.batch.token_weight[self.index]

    @property
    def logprobs(self) -> Float[Tensor, " n"]:
        """log π(target) at the batch's temperature."""
        return self.scalar(LogProb(self.batch.temperature))

    @property
    def advantages(self) -> Float[Tensor, " n"]:
        assert self.batch.advantages is not None, "check() requires it"
        return self.batch.advantages[self.index]

    @property
    def behaviour(self) -> Float[Tensor, " n"]:
        assert self.batch.behaviour is not None, "check() requires it"
        return self.batch.behaviour[self.index]

    @property
    def proximal(self) -> Float[Tensor, " n"]:
        assert self.batch.proximal is not None, "check() requires it"
        return self.batch.proximal[self.index]

    @property
    def reference(self) -> Float[Tensor, " n"]:
        """log π₀(target) of the reference policy."""
        assert self.batch.reference is not None and self.batch.reference.logprobs is not None, "check() requires it"
        return self.batch.reference.logprobs[self.index]

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
        """Σ w·x over each row's tokens."""
        return self._add_up(values * self.weight.to(values.dtype))

    def row_mean(self, values: Float[Tensor, " n"]) -> Float[Tensor, " S"]:
        """Σ w·x / Σ w over each row's tokens."""
        mass = self._add_up(self.weight.to(values.dtype))
        if not bool((mass > 0).all()):
            row = int(self.rows[(mass <= 0).nonzero()[0, 0]])
            raise SignalError(
                f"{self.label}: the weights of row {row} sum to {float(mass.min()):g}; a mean over a row needs a "
                "positive sum."
            )
        return self.row_sum(values) / mass

    def _add_up(self, values: Float[Tensor, " n"]) -> Float[Tensor, " S"]:
        return torch.zeros(len(self.rows), dtype=values.dtype, device=values.device).index_add(0, self.segment, values)

    def total(self, values: Float[Tensor, "n ..."]) -> Float[Tensor, ""]:
        """Σ w·x, also over K targets per position."""
        return (values * self.weight.to(values.dtype)).sum()

    def token_mean(self, values: Float[Tensor, "n ..."]) -> Float[Tensor, ""]:
        """Σ w·x / (all weights of the whole batch)."""
        return self.total(values) / self.counts.tokens

    def sequence_mean(self, values: Float[Tensor, " n"]) -> Float[Tensor, ""]:
        """Mean over the whole batch's sequences of each one's token mean."""
        return self.row_mean(values).sum() / self.counts.sequences

    def mean(self, values: Float[Tensor, " n"], per: str) -> Float[Tensor, ""]:
        """By ``per``: the mean over all tokens, over the sequences' token means, or over the sequences' token sums."""
        if per == "sum":
            return self.total(values) / self.counts.sequences
        return self.token_mean(values) if per == "token" else self.sequence_mean(values)

    def pairs(self) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"]]:
        """Indices in ``rows`` of the chosen and of the rejected row of every pair."""
        places: dict[int, dict[str, int]] = {}
        for place, row in enumerate(self.rows.tolist()):
            pair, role = int(self.batch.pair[row]), self.batch.role[row]
            if pair < 0 or role in places.setdefault(pair, {}):
                raise SignalError(
                    f"{self.label}: row {row} ({role}) has pair {pair}; every pair id joins one chosen and one "
                    "rejected row."
                )
            places[pair][role] = place
        for pair, members in places.items():
            if set(members) != {"chosen", "rejected"}:
                raise SignalError(
                    f"{self.label}: pair {pair} has only {sorted(members)}; every pair needs a chosen and a rejected "
                    "row."
                )
        device = self.index.device
        order = sorted(places)
        chosen = torch.tensor([places[p]["chosen"] for p in order], device=device)
        rejected = torch.tensor([places[p]["rejected"] for p in order], device=device)
        return chosen, rejected
