"""Completions for many conversations at the same time: while some wait for their tools, the others are decoded.

A conversation awaits ``sample(row)``. ``serve`` runs beside the conversations in the same event loop and decodes all
rows that were asked for. A completion depends on (weights, prompt, seed, draw) only, so the order of arrival does not
matter.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from earnest.models import SampleSpec
from earnest.models.sampling import SampleRow
from earnest.rollouts.attempts import Sample
from earnest.rollouts.rollout import Rollout
from earnest.seeds import derive

if TYPE_CHECKING:
    from earnest.models.slots import SlotSampler


@runtime_checkable
class HasSlots(Protocol):
    """An engine whose sampler rows can join at any time."""

    version: int

    def slots(self, spec: SampleSpec, tokens: int, max_rows: int) -> AbstractContextManager[SlotSampler]: ...


class TurnSampler:
    """Rows that wait for their completion. ``drawn`` has every completion, as the sampler returned it."""

    def __init__(self) -> None:
        self.drawn: dict[tuple[int, int], list[Rollout]] = defaultdict(list)
        self._waiting: list[SampleRow] = []
        self._futures: dict[SampleRow, asyncio.Future[Rollout]] = {}
        self._asked = asyncio.Event()

    async def sample(self, row: SampleRow) -> Rollout:
        """The completion of this row."""
        self._waiting.append(row)
        self._futures[row] = asyncio.get_running_loop().create_future()
        self._asked.set()
        return await self._futures[row]

    async def _ask(self) -> list[SampleRow]:
        """The rows that came since the last time; waits for one."""
        await self._asked.wait()
        return self._taken()

    def _taken(self) -> list[SampleRow]:
        self._asked.clear()
        rows, self._waiting = self._waiting, []
        return rows

    def _give(self, row: SampleRow, rollout: Rollout) -> None:
        self.drawn[row.prompt_index, row.sample_index].append(rollout)
        self._futures.pop(row).set_result(rollout)

    def ended(self, prompt_index: int, sample_index: int) -> None:
        """The conversation has no further turn."""

    async def serve(self) -> None:
        """Complete rows until cancelled."""
        raise NotImplementedError  # abstract: both samplers of turns define it


class SlotTurns(TurnSampler):
    """The local sampler: one token of every row, then the conversations go on, then the next token."""

    def __init__(self, slots: SlotSampler, spec: SampleSpec, engine: HasSlots) -> None:
        super().__init__()
        self.slots, self.spec, self.engine = slots, spec, engine

    def ended(self, prompt_index: int, sample_index: int) -> None:
        self.slots.forget(prompt_index, sample_index)

    async def serve(self) -> None:
        while True:
            rows = self._taken() if len(self.slots) else await self._ask()
            self.slots.submit(rows)
            version = self.engine.version
            with torch.no_grad():  # also in the thread of this event loop
                finished = self.slots.step()
            for row, c in finished:
                self._give(row, Rollout.of(c, row.prompt_index, row.prompt, version, self.spec))
            await asyncio.sleep(0)


class CallTurns(TurnSampler):
    """A sampler elsewhere, which takes whole batches: all rows that wait, grouped by the number of their draw."""

    def __init__(self, call: Sample, spec: SampleSpec) -> None:
        super().__init__()
        self.call, self.spec = call, spec

    async def serve(self) -> None:
        while True:
            groups: dict[tuple[int, int], list[SampleRow]] = defaultdict(list)
            for row in await self._ask():
                groups[row.draw, min(row.limit, self.spec.max_new_tokens)].append(row)
            for (draw, limit), rows in groups.items():
                spec = replace(self.spec, seed=derive(self.spec.seed, "draw", draw), max_new_tokens=limit)
                found = await asyncio.to_thread(self.call, [row.prompt for row in rows], 1, spec)
                for row, rollout in zip(rows, found, strict=True):
                    own = replace(rollout, prompt_index=row.prompt_index, sample_index=row.sample_index)
                    self._give(row, own)
