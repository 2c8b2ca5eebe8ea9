"""Continuous batching: rows join and leave the decoding batch at every token.

A row that has ended leaves its slot to the next row that waits. Each row has its own random numbers. Its prompt is
computed once for all rows that wait with the same one, and what all waiting prompts begin with once for all of them. So
a completion is a function of (weights, prompt, seed, draw), whatever else is in the batch and whenever it joined, up to
the rounding of matrix products of other shapes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from earnest.errors import SamplingError
from earnest.models.cache import Cached, CacheKind, Prefix, Sequences, join, reuse, start, trim
from earnest.models.packed import PACKED_FROM, PackedWeights
from earnest.models.policy import Policy
from earnest.models.sampling import Completion, SampleRow, SampleSpec, evaluating, pick, uniforms

CHOOSE_ELEMENTS = 1 << 23  # logits that are computed in one piece
_PIECE = 1 << 18  # logits that a CPU normalises in one piece: its temporary tensors stay in the cache
_KEPT_BYTES = 1 << 29  # keys and values of conversations that wait; those of others are computed again
_SHARED = 64  # tokens that a common beginning must save; a forward pass for fewer costs more than it saves
_TRIM_EVERY = 32  # steps between two looks for columns that are padding in every row

Finished = list[tuple[SampleRow, Completion]]
Progress = Callable[[int, int], None]


def sample(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    n: int,
    spec: SampleSpec,
    progress: Progress | None = None,
    *,
    max_rows: int = 256,
    compact_below: float = 0.75,
    cache: CacheKind | None = None,
) -> list[Completion]:
    """``n`` completions of each prompt, prompt by prompt.

    progress(finished, total) is called when completions finish.
    The other settings are those of ``SlotSampler``.
    """
    rows = _rows(policy, prompts, n, spec)
    done: dict[tuple[int, int], Completion] = {}
    with evaluating(policy):
        slots = SlotSampler(policy, spec, max_rows=max_rows, compact_below=compact_below, cache=cache)
        slots.submit(sorted(rows, key=lambda row: len(row.prompt)))
        while len(done) < len(rows):
            for row, completion in slots.step():
                done[row.prompt_index, row.sample_index] = completion
            if progress is not None:
                progress(len(done), len(rows))
    return [done[i, j] for i in range(len(prompts)) for j in range(n)]


def _rows(policy: Policy, prompts: Sequence[Sequence[int]], n: int, spec: SampleSpec) -> list[SampleRow]:
    if n < 1:
        raise SamplingError(f"n is {n}; give at least 1 completion per prompt.")
    if not prompts:
        raise SamplingError("There are no prompts to sample from; give at least one.")
    vocabulary = policy.head.weight.shape[0]
    limit = policy.positions
    seen: Counter[tuple[int, ...]] = Counter()
    rows = []
    for i, prompt in enumerate(prompts):
        ids = tuple(int(t) for t in prompt)
        if not ids:
            raise SamplingError(
                f"Prompt {i} has no tokens; give at least one (policy.render(messages), or policy.encode(text))."
            )
        if min(ids) < 0 or max(ids) >= vocabulary:
            bad = next(t for t in ids if not 0 <= t < vocabulary)
            raise SamplingError(
                f"Prompt {i} has the token id {bad}, {policy.name} has 0 to {vocabulary - 1}; use its own tokenizer "
                "(policy.render)."
            )
        if limit and len(ids) + spec.max_new_tokens - 1 > limit:
            raise SamplingError(
                f"Prompt {i} has {len(ids)} tokens; with max_new_tokens={spec.max_new_tokens} that is more than the "
                f"{limit} positions of {policy.name}. Shorten the prompt or lower max_new_tokens."
            )
        rows += [SampleRow(i, j, ids, seen[ids] + j, spec.max_new_tokens) for j in range(n)]
        seen[ids] += n
    return rows


@dataclass(eq=False)
class _Group:
    """Rows that are decoded together. R slots, S = max_new_tokens."""

    rows: list[SampleRow]
    sequences: Sequences
    uniforms: Float[Tensor, "R S"]
    tokens: Int[Tensor, "R S"]
    logprobs: Float[Tensor, "R S"]
    count: Int[Tensor, " R"]
    """Tokens that each row has."""
    limit: Int[Tensor, " R"]
    alive: Bool[Tensor, " R"]
    steps: int = 0

    _state: ClassVar[tuple[str, ...]] = ("uniforms", "tokens", "logprobs", "count", "limit", "alive")

    def keep(self, slots: Int[Tensor, " r"]) -> None:
        """Continue with these slots only."""
        self.sequences.keep(slots)
        self.rows = [self.rows[i] for i in slots.tolist()]
        for name in self._state:
            setattr(self, name, getattr(self, name)[slots])

    def take(self, fresh: _Group) -> None:
        """Put the rows of ``fresh`` into the slots of rows that have ended, and append those for which none is left."""
        assert isinstance(self.sequences, Cached) and isinstance(fresh.sequences, Cached)
        free = (~self.alive).nonzero()[:, 0][: len(fresh.rows)]
        count = len(free)
        if count:
            reuse(self.sequences, free, fresh.sequences)
            for name in self._state:
                getattr(self, name)[free] = getattr(fresh, name)[:count]
            for slot, row in zip(free.tolist(), fresh.rows[:count], strict=True):
                self.rows[slot] = row
        if count < len(fresh.rows):
            if count:
                fresh.keep(torch.arange(count, len(fresh.rows), device=free.device))
            join(self.sequences, fresh.sequences)
            self.rows += fresh.rows
            for name in self._state:
                setattr(self, name, torch.cat([getattr(self, name), getattr(fresh, name)]))


class SlotSampler:
    """Samples rows as they are submitted; ``step`` decodes one more token of every row. Use it inside ``evaluating``.

    max_rows: rows that are decoded together; the others wait.
    resume: keep the keys and values of rows that end, for a row of the same (prompt, sample) whose prompt begins with
    their tokens: the next turn of a conversation. ``forget`` drops them.
    compact_below: drop ended rows once the others are at most this share of the batch and none waits (0: never).
    cache: default: the fastest kind that works for the architecture (`Policy.cache_kind`); a slower one is allowed.
    """

    def __init__(
        self,
        policy: Policy,
        spec: SampleSpec,
        *,
        max_rows: int = 256,
        compact_below: float = 0.75,
        cache: CacheKind | None = None,
        resume: bool = False,
    ) -> None:
        self.policy, self.spec, self.max_rows, self.compact_below = policy, spec, max_rows, compact_below
        self.kind = _allowed(policy, cache)
        self.tokens = 0
        """Tokens that were sampled so far."""
        self._waiting: deque[SampleRow] = deque()
        self._groups: list[_Group] = []
        self._ends = torch.as_tensor(sorted(spec.ends(policy)), dtype=torch.long, device=policy.device)
        self._alive = 0
        self._from_prefixes = self.kind == "buffered" and policy.can_resume
        self._resume = resume and self._from_prefixes
        self._prefixes: dict[tuple[int, int], Prefix] = {}
        self._packed = PackedWeights(policy, copies=False)

    def __len__(self) -> int:
        """Rows that wait or are being decoded."""
        return len(self._waiting) + self._alive

    def submit(self, rows: Iterable[SampleRow]) -> None:
        """Add rows; they are decoded from the next step on that has a slot for them."""
        self._waiting.extend(rows)

    def forget(self, prompt_index: int, sample_index: int) -> None:
        """The conversation has ended."""
        self._prefixes.pop((prompt_index, sample_index), None)

    def step(self) -> Finished:
        """Decode one more token of every row; returns the rows that end with it."""
        self._packed.copies |= len(self) > 1 and self.spec.max_new_tokens >= PACKED_FROM
        finished: Finished = []
        with self._packed:
            self._admit()
            for group in list(self._groups):
                finished += self._advance(group)
        self._alive -= len(finished)
        return finished

    def _admit(self) -> None:
        count = min(len(self._waiting), self.max_rows - self._alive)
        if count <= 0:
            return
        rows = [self._waiting.popleft() for _ in range(count)]
        self._alive += count
        if self.kind == "buffered":
            fresh = self._start(rows)
            if self._groups:
                self._groups[0].take(fresh)
            else:
                self._groups.append(fresh)
            return
        rows.sort(key=lambda row: len(row.prompt))  # the other caches need prompts of equal length
        self._groups += [self._start(list(same)) for _, same in groupby(rows, key=lambda row: len(row.prompt))]

    def _start(self, rows: list[SampleRow]) -> _Group:
        device, steps = self.policy.device, self.spec.max_new_tokens
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(row.prompt for row in rows))}
        prefixes = self._prefixes_of(rows, place) if self._prefixes else self._shared(list(place))
        owner = torch.as_tensor([place[row.prompt] for row in rows], device=device)
        exact = torch.float32 if device.type == "mps" else torch.float64
        return _Group(
            rows,
            start(self.policy, self.kind, list(place), owner, steps, prefixes),
            torch.as_tensor(uniforms(rows, self.spec.seed, steps)).to(device=device, dtype=exact),
            torch.zeros(len(rows), steps, dtype=torch.long, device=device),
            torch.zeros(len(rows), steps, device=device),
            torch.zeros(len(rows), dtype=torch.long, device=device),
            torch.as_tensor([min(row.limit, steps) for row in rows], device=device),
            torch.ones(len(rows), dtype=torch.bool, device=device),
        )

    def _prefixes_of(self, rows: list[SampleRow], place: dict[tuple[int, ...], int]) -> list[Prefix | None] | None:
        found: list[Prefix | None] = [None] * len(place)
        for row in rows:
            prefix = self._prefixes.pop((row.prompt_index, row.sample_index), None)
            if prefix is not None and row.prompt[: len(prefix.tokens)] == prefix.tokens != row.prompt:
                found[place[row.prompt]] = prefix
        return found if any(found) else None

    def _shared(self, prompts: list[tuple[int, ...]]) -> list[Prefix | None] | None:
        """The tokens with which all prompts begin, such as a system prompt, are computed once."""
        first, last = min(prompts), max(prompts)  # what these two share, all share
        most = min(map(len, prompts)) - 1
        count = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), most)
        if not self._from_prefixes or count * (len(prompts) - 1) < _SHARED:
            return None
        common = first[:count]
        one = start(self.policy, self.kind, [common], torch.zeros(1, dtype=torch.long, device=self.policy.device), 0)
        assert isinstance(one, Cached)
        return [one.prefix(0, common)] * len(prompts)

    def _advance(self, group: _Group) -> Finished:
        # an ended row writes over its last token, which was read already
        at = group.count.clamp_max(group.tokens.shape[1] - 1)[:, None]
        token, logprob = _choose(self.policy, group.sequences.last, group.uniforms.gather(1, at)[:, 0], self.spec)
        group.tokens.scatter_(1, at, token[:, None])
        group.logprobs.scatter_(1, at, logprob[:, None])
        group.count += 1
        stops = torch.isin(token, self._ends)
        if self.spec.stop:
            stops |= self._completes(group)
        over = (stops | (group.count >= group.limit)) & group.alive
        finished: Finished = []
        if bool(over.any()):
            finished = self._collect(group, over, stops)
            group.alive &= ~over
        alive = group.alive.nonzero()[:, 0]
        if not len(alive):
            self._groups.remove(group)
            return finished
        if len(alive) <= self.compact_below * len(group.rows) and not (self._waiting and self.kind == "buffered"):
            group.keep(alive)
            token = token[alive]
        self._make_room(group)
        group.sequences.step(token)
        return finished

    def _collect(self, group: _Group, over: Bool[Tensor, " R"], stops: Bool[Tensor, " R"]) -> Finished:
        places = over.nonzero()[:, 0]
        counts, stopped = group.count[places].tolist(), stops[places].tolist()
        ids, values = group.tokens[places].tolist(), group.logprobs[places].tolist()
        self.tokens += sum(counts)
        finished: Finished = []
        for i, place in enumerate(places.tolist()):
            row, k = group.rows[place], counts[i]
            end: Literal["stop", "length"] = "stop" if stopped[i] else "length"
            done = Completion(row.prompt_index, row.sample_index, tuple(ids[i][:k]), tuple(values[i][:k]), end)
            finished.append((row, done))
            if self._resume and isinstance(group.sequences, Cached):
                kept = group.sequences.prefix(place, (*row.prompt, *done.tokens[:-1]))  # the last token was not read
                if sum(p.size for p in self._prefixes.values()) + kept.size <= _KEPT_BYTES:
                    self._prefixes[row.prompt_index, row.sample_index] = kept
        return finished

    def _make_room(self, group: _Group) -> None:
        """Rows that joined late may need more columns than the first ones; those that left may have needed more."""
        group.steps += 1
        rows = group.sequences
        if self.kind == "buffered" and isinstance(rows, Cached):
            full = rows.used + 1 >= rows.mask.shape[1]
            if full or (rows.ragged and group.steps % _TRIM_EVERY == 0):
                trim(rows)

    def _completes(self, group: _Group) -> Bool[Tensor, " R"]:
        """Whether each row's text contains a stop string; special tokens count as text."""
        counts = group.count.tolist()
        texts = [
            self.policy.tokenizer.decode(ids[:n], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            for ids, n in zip(group.tokens.tolist(), counts, strict=True)
        ]
        return torch.as_tensor([any(s in text for s in self.spec.stop) for text in texts], device=group.tokens.device)


def _choose(
    policy: Policy, hidden: Float[Tensor, "R d"], u: Float[Tensor, " R"], spec: SampleSpec
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """The next token of each row and its log-prob, in parts of the rows, so that [R, V] stays small."""
    vocabulary = policy.head.weight.shape[0]
    size = max(1, CHOOSE_ELEMENTS // vocabulary)
    piece = max(1, _PIECE // vocabulary) if hidden.device.type == "cpu" else size
    parts = []
    for h, v in zip(hidden.split(size), u.split(size), strict=True):
        logits = policy.head.logits(h)
        parts += [pick(z, w, spec) for z, w in zip(logits.split(piece), v.split(piece), strict=True)]
    token, logprob = (torch.cat(column) for column in zip(*parts, strict=True)) if len(parts) > 1 else parts[0]
    if not bool(logprob.isfinite().all()):
        raise SamplingError(
            f"{policy.name} gave logits that are not finite (nan or inf). The weights, or an adapter on them, have "
            "diverged: go back to a checkpoint, or load in float32 if this is float16."
        )
    return token, logprob


def _allowed(policy: Policy, wanted: CacheKind | None) -> CacheKind:
    slower: Sequence[CacheKind] = ("buffered", "dynamic", "none")
    allowed = slower[slower.index(policy.cache_kind) :]
    if wanted is not None and wanted not in allowed:
        raise SamplingError(f"cache is {wanted!r}; {policy.name} works with {', '.join(allowed)}.")
    return wanted or policy.cache_kind
