"""Continuous batching: sequences join and leave the decoding batch at every token.

Each row has its own adapter, its own sampling settings and its own random numbers, which are those of
``earnest.models.sample``: a completion is a function of (weights, prompt, seed, draw), whatever else is in the batch.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from earnest.errors import EarnestError, SamplingError
from earnest.models.cache import Cached, Sequences, join, start, trim
from earnest.models.policy import Policy
from earnest.models.sampling import SampleRow, SampleSpec, pick, uniforms
from earnest.serve.grammar import Matcher

if TYPE_CHECKING:
    from earnest.adapters import Adapter
    from earnest.serve.host import Host

log = logging.getLogger("earnest.serve")
Finish = Literal["stop", "length", "cancelled"]


class QueueFull(EarnestError):
    """Too many sequences wait already."""


@dataclass(frozen=True)
class DecodedToken:
    """One decoded token: its log-prob under the distribution that was sampled from, and on request the most probable
    tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Done:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    tops: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True)
class Shaping:
    """Changes of the logits before temperature, top-k and top-p; c counts a token in the completion so far.

        z ← z - frequency · c - presence · [c > 0];   tokens outside the grammar or with π < min_p · max π are left out

    Log-probs are those of the distribution that results.
    """

    presence: float = 0.0
    frequency: float = 0.0
    min_p: float = 0.0
    grammar: str | None = None


@dataclass(frozen=True)
class Request:
    """``n`` completions of one prompt by one adapter (None: the base). ``top``: how many alternatives to report."""

    prompt: tuple[int, ...]
    spec: SampleSpec
    adapter: Adapter | None = None
    n: int = 1
    top: int = 0
    shaping: Shaping = Shaping()
    on_step: Callable[[int, DecodedToken], None] | None = None


class PendingRequest:
    """A submitted request: it waits for a place or is being decoded."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.cancelled = False
        self.done: list[Done | None] = [None] * request.n
        self.reported = [0] * request.n  # steps of each completion that ``on_step`` has seen
        self.future: Future[list[Done]] = Future()

    def cancel(self) -> None:
        """Cancel it: its rows leave the batch at the next token."""
        self.cancelled = True

    def result(self, timeout: float | None = None) -> list[Done]:
        return self.future.result(timeout)

    def finish(self, index: int, done: Done) -> None:
        self.done[index] = done
        if all(d is not None for d in self.done) and not self.future.done():
            self.future.set_result([d for d in self.done if d is not None])

    def report(self, index: int, number: int, step: DecodedToken) -> None:
        """Pass a step to ``on_step``, once: a request that is decoded again repeats its steps."""
        if number > self.reported[index]:
            self.reported[index] = number
            if self.request.on_step is not None:
                self.request.on_step(index, step)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(eq=False)
class _Row:
    pending: PendingRequest
    index: int
    numbers: list[float]
    steps: list[DecodedToken] = field(default_factory=list)
    matcher: Matcher | None = None

    @property
    def spec(self) -> SampleSpec:
        return self.pending.request.spec

    def shaped(self, logits: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        """The logits of its next token after penalties, grammar and min-p."""
        shaping = self.pending.request.shaping
        if self.steps and (shaping.presence or shaping.frequency):
            ids, counts = torch.tensor([s.token for s in self.steps], device=logits.device).unique(return_counts=True)
            logits = logits.index_add(0, ids, -(shaping.presence + shaping.frequency * counts.to(logits.dtype)))
        if self.matcher is not None:
            logits = self.matcher.mask(logits)
        if shaping.min_p > 0 and self.spec.temperature > 0:
            least = logits.max() + self.spec.temperature * math.log(shaping.min_p)
            logits = logits.masked_fill(logits < least, -math.inf)
        return logits

    def end(self, finish: Finish) -> None:
        tops = tuple(s.top for s in self.steps) if self.pending.request.top else ()
        done = Done(tuple(s.token for s in self.steps), tuple(s.logprob for s in self.steps), finish, tops)
        self.pending.finish(self.index, done)


@dataclass(eq=False)
class _Group:
    rows: list[_Row]
    sequences: Sequences


def check(policy: Policy, request: Request) -> None:
    """Refuse a request that cannot be decoded, before it waits for a place."""
    vocabulary = policy.head.weight.shape[0]
    if not request.prompt:
        raise SamplingError("the prompt has no tokens; give at least one.")
    bad = [t for t in request.prompt if not 0 <= t < vocabulary]
    if bad:
        raise SamplingError(f"the prompt has the token id {bad[0]}, {policy.name} knows 0 to {vocabulary - 1}.")
    room = policy.positions
    if room is not None and len(request.prompt) + request.spec.max_new_tokens - 1 > room:
        raise SamplingError(
            f"the prompt has {len(request.prompt)} tokens; with {request.spec.max_new_tokens} more that is beyond the "
            f"{room} positions of {policy.name}. Shorten the prompt or lower max_tokens."
        )


class DecodeBatch:
    """The sequences that are decoded together. Every call is one unit of work, inside a turn."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.groups: list[_Group] = []

    def __len__(self) -> int:
        return sum(len(g.rows) for g in self.groups)

    @torch.no_grad()
    def admit(self, submitted: Sequence[PendingRequest]) -> None:
        """Read the prompts (each once per adapter) and join the batch."""
        policy = self.host.policy
        buffered = policy.cache_kind == "buffered"
        waves: dict[int, list[PendingRequest]] = {}
        for pending in submitted:  # only a buffered cache takes prompts of different lengths
            waves.setdefault(0 if buffered else len(pending.request.prompt), []).append(pending)
        for wave in waves.values():
            places: dict[tuple[tuple[int, ...], int], int] = {}
            owner: list[int] = []
            adapters: list[Adapter | None] = []
            rows: list[_Row] = []
            for pending in wave:
                r = pending.request
                place = places.setdefault((r.prompt, id(r.adapter)), len(places))
                if place == len(adapters):
                    adapters.append(r.adapter)
                own = [SampleRow(0, index, r.prompt, index) for index in range(r.n)]
                for index, numbers in enumerate(uniforms(own, r.spec.seed, r.spec.max_new_tokens)):
                    matcher = None if r.shaping.grammar is None else self.host.grammars.matcher(r.shaping.grammar)
                    rows.append(_Row(pending, index, numbers.tolist(), matcher=matcher))
                    owner.append(place)
            new = max(f.request.spec.max_new_tokens for f in wave)
            with self.host.rows(adapters):
                prompts = [prompt for prompt, _ in places]
                fresh = start(policy, policy.cache_kind, prompts, torch.as_tensor(owner, device=policy.device), new)
            if buffered and self.groups:
                group = self.groups[0]
                ours = group.sequences
                assert isinstance(ours, Cached) and isinstance(fresh, Cached)
                join(ours, fresh)
                group.rows += rows
            else:
                self.groups.append(_Group(rows, fresh))

    @torch.no_grad()
    def step(self) -> None:
        for group in list(self.groups):
            self._choose(group)
            alive = [i for i, row in enumerate(group.rows) if not self._ends(row)]
            if not alive:
                self.groups.remove(group)
                continue
            if len(alive) < len(group.rows):
                group.sequences.keep(torch.as_tensor(alive, device=self.host.policy.device))
                group.rows = [group.rows[i] for i in alive]
            if isinstance(group.sequences, Cached) and self.host.policy.cache_kind == "buffered":
                trim(group.sequences)
            with self.host.rows([row.pending.request.adapter for row in group.rows]):
                tokens = [row.steps[-1].token for row in group.rows]
                group.sequences.step(torch.as_tensor(tokens, device=self.host.policy.device))

    def clear(self) -> list[PendingRequest]:
        """Empty the batch; returns the requests that were in it."""
        submitted = list(dict.fromkeys(row.pending for group in self.groups for row in group.rows))
        self.groups = []
        return submitted

    def _choose(self, group: _Group) -> None:
        """Append a token to every row: rows with the same settings are chosen together."""
        policy, hidden = self.host.policy, group.sequences.last
        exact = torch.float32 if policy.device.type == "mps" else torch.float64
        kinds: dict[tuple[float, int, float], list[int]] = {}
        for i, row in enumerate(group.rows):
            kinds.setdefault((row.spec.temperature, row.spec.top_k, row.spec.top_p), []).append(i)
        # An adapter may also be on the output head.
        with self.host.rows([row.pending.request.adapter for row in group.rows]):
            logits = policy.head.logits(hidden[:, None] if not policy.head.plain else hidden).float()
            logits = logits.reshape(len(group.rows), -1)
        shaped = [i for i, row in enumerate(group.rows) if row.pending.request.shaping != Shaping()]
        if shaped:
            logits = logits.clone()
            for i in shaped:
                logits[i] = group.rows[i].shaped(logits[i])
        for places in kinds.values():
            rows = [group.rows[i] for i in places]
            u = torch.tensor([r.numbers[len(r.steps)] for r in rows], dtype=exact, device=policy.device)
            own = logits if len(places) == len(group.rows) else logits[places]
            token, logprob = pick(own, u, rows[0].spec)
            tops = _tops(own, rows)
            for row, t, lp, top in zip(rows, token.tolist(), logprob.tolist(), tops, strict=True):
                step = DecodedToken(t, lp, top[: row.pending.request.top])
                row.steps.append(step)
                if row.matcher is not None:
                    row.matcher.accept(t)
                row.pending.report(row.index, len(row.steps), step)

    def _ends(self, row: _Row) -> bool:
        policy = self.host.policy
        last = row.steps[-1]
        if last.logprob != last.logprob or last.logprob == -float("inf"):
            row.pending.fail(
                SamplingError(
                    f"{policy.name} gave logits that are not finite (nan or inf): the adapter has diverged; roll back."
                )
            )
            return True
        if row.pending.future.done():  # another completion of this request failed
            return True
        finish: Finish | None = None
        text = self.host.text.decode([s.token for s in row.steps], special=True) if row.spec.stop else ""
        if last.token in row.spec.ends(policy) or any(s in text for s in row.spec.stop):
            finish = "stop"
        elif len(row.steps) == row.spec.max_new_tokens:
            finish = "length"
        elif row.pending.cancelled:
            finish = "cancelled"
        if finish is None:
            return False
        row.end(finish)
        return True


def decode(host: Host, requests: Sequence[Request], yield_turn: Callable[[], None]) -> list[list[Done]]:
    """The completions of these requests, inside a turn; a few at a time, so that chats are served in between."""
    submitted = [PendingRequest(request) for request in requests]
    for first in range(0, len(submitted), 4):
        _drain(host, submitted[first : first + 4], yield_turn)
    return [pending.result() for pending in submitted]


def _drain(host: Host, submitted: Sequence[PendingRequest], yield_turn: Callable[[], None]) -> None:
    """Decode these requests together, apart from all others."""
    batch = DecodeBatch(host)
    batch.admit(submitted)
    while len(batch):
        batch.step()
        yield_turn()


def _tops(logits: Tensor, rows: Sequence[_Row]) -> list[tuple[tuple[int, float], ...]]:
    """The most probable tokens of each row, up to the largest number that any row needs, from the distribution that was
    sampled from."""
    most = max(r.pending.request.top for r in rows)
    if most == 0:
        return [()] * len(rows)
    from earnest.models.sampling import truncate

    spec = rows[0].spec
    if spec.temperature > 0:
        logits = truncate(logits / spec.temperature, spec.top_k, spec.top_p)
    values, ids = logits.log_softmax(-1).topk(min(most, logits.shape[-1]), -1)
    return [
        tuple((t, v) for t, v in zip(a, b, strict=True) if v > -float("inf"))
        for a, b in zip(ids.tolist(), values.tolist(), strict=True)
    ]


class Decoder:
    """The thread that answers chats: it takes the turn while there is something to decode, and yields it after each
    token."""

    def __init__(self, host: Host, max_rows: int, max_waiting: int) -> None:
        self.host, self.max_rows, self.max_waiting = host, max_rows, max_waiting
        self.batch = DecodeBatch(host)
        self.tokens = 0
        self._waiting: deque[PendingRequest] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="earnest-chat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> PendingRequest:
        """Accept a request; it waits for a place in the batch. Raises ``QueueFull`` if too many wait."""
        check(self.host.policy, request)
        if request.n > self.max_rows:
            raise SamplingError(f"n is {request.n}; this server decodes at most {self.max_rows} sequences together.")
        if request.n > self.max_waiting:  # after a 429 the client would try again for ever
            raise SamplingError(f"n is {request.n}; at this server at most {self.max_waiting} sequences may wait.")
        pending = PendingRequest(request)
        with self._wake:
            if self._closed:
                raise QueueFull("the server is shutting down.")
            waiting = sum(f.request.n for f in self._waiting)
            if waiting + request.n > self.max_waiting:
                raise QueueFull(
                    f"{waiting} sequences wait already, at most {self.max_waiting} may; try again in a moment."
                )
            self._waiting.append(pending)
            self._wake.notify()
        return pending

    def abort(self, adapter: Adapter | None) -> int:
        """Cancel the adapter's requests: each ends at its next token. Returns how many there are."""
        with self._wake:
            decoded = [row.pending for group in list(self.batch.groups) for row in list(group.rows)]
            own = {pending for pending in (*self._waiting, *decoded) if pending.request.adapter is adapter}
        for pending in own:
            pending.cancel()
        return len(own)

    def load(self) -> dict[str, int]:
        return {"running": len(self.batch), "waiting": sum(f.request.n for f in list(self._waiting))}

    def close(self) -> None:
        """Finish the requests that are being decoded, and refuse those that wait."""
        with self._wake:
            self._closed = True
            refused = list(self._waiting)
            self._waiting.clear()
            self._wake.notify()
        for pending in refused:
            pending.fail(QueueFull("the server is shutting down."))
        if self._thread.ident is not None:  # a model that failed to load never started it
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
            with self.host.turn("chat") as turn:
                while self._waiting or len(self.batch):
                    try:
                        if submitted := self._next():
                            self.batch.admit(submitted)
                        if len(self.batch):
                            self.tokens += len(self.batch)
                            self.batch.step()
                    except Exception:
                        log.exception("decoding a batch failed; its requests are decoded one by one")
                        for pending in dict.fromkeys([*self.batch.clear(), *submitted]):
                            try:  # from its start: its tokens depend on the weights, the prompt and the seed only
                                _drain(self.host, [pending], turn.yield_turn)
                            except Exception as error:
                                log.exception("decoding a request failed")
                                pending.fail(error)
                    turn.yield_turn()

    def _next(self) -> list[PendingRequest]:
        """The waiting requests that have a place now, in order of arrival."""
        room = self.max_rows - len(self.batch)
        chosen: list[PendingRequest] = []
        with self._wake:
            while self._waiting and (self._waiting[0].cancelled or self._waiting[0].request.n <= room):
                pending = self._waiting.popleft()
                if pending.cancelled:
                    for index in range(pending.request.n):
                        pending.finish(index, Done((), (), "cancelled"))
                    continue
                room -= pending.request.n
                chosen.append(pending)
        return chosen
