"""One outer round among replicas that share only a bucket.

    1. write one's delta (create: it counts once, even if its writer dies now)
    2. look: once a quorum of valid deltas is there, and every expected delta is there or the grace window is over,
       write the commit = the member list (create: the first one decides)
    3. read the members' deltas, average them in list order, weighted by tokens: the same bits everywhere

A delta is valid if its hash is right, its numbers are finite, and it starts from the state that the last commit ends
in. The members of the last round and every replica that announced itself in this one are expected, so a dead
replica costs one grace window, not one per round. No replica compares its clock with another machine's.

Invariants (tests/diloco/test_schedules.py checks them under random schedules, kills, lost answers and damage):
    agreement     all who finish round k have the same state, and it is the fingerprint in commit k
    chain         commit k starts where commit k-1 ended; rounds are committed without gaps
    validity      only deltas that were written for this round, from its start, are averaged; each replica once
    weight        a delta counts by the tokens that made it: those trained on since its own fragment was last averaged
    durability    a committed round is never undone: whoever joins later arrives at the same state
    progress      with a quorum alive, some replica can always finish the round
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from earnest.diloco.errors import DivergedState, FellBehind, RoundStuck
from earnest.diloco.ledger import Commit, Ledger
from earnest.diloco.wire import FlatVector, decode
from earnest.store import Damaged

ATTEMPTS = 3
"""How often a delta whose upload is incomplete is written again."""


@dataclass(frozen=True)
class Rules:
    """``quorum``: valid deltas that a commit needs; ``grace``: seconds that the late ones get after that."""

    replicas: int
    quorum: int
    grace: float = 30.0
    timeout: float = 3600.0
    poll: float = 0.1
    slowest: float = 2.0
    """Seconds between two looks, at first and at most."""
    max_norm: float | None = None
    """See ``limited``."""

    def pause(self, waited: float) -> float:
        """Seconds until the next look, after ``waited`` seconds: a tenth of them. No replica waits more than a tenth
        longer than it must, and a thousand waiting replicas do not send ten requests per second each."""
        return min(max(self.poll, 0.1 * waited), self.slowest)

    def looks(self, waited: float) -> int:
        """How often a replica looks in ``waited`` seconds."""
        count, at = 1, 0.0
        while at < waited:
            at += self.pause(at)
            count += 1
        return count


@dataclass(frozen=True)
class Contribution:
    round: int
    replica: int
    start: str
    """Fingerprint of the state that its delta is the difference from."""
    payload: bytes
    tokens: int
    n: int
    """How many numbers the delta has."""
    meta: dict[str, Any]


@dataclass(frozen=True)
class RoundResult:
    """How a round ended. ``sent`` is this replica's delta as the others read it; None where it is not averaged."""

    commit: Commit
    average: FlatVector
    sent: FlatVector | None
    superseded: bool
    """Another process with this replica's number had written the delta."""
    damaged: int
    """Deltas that could not be used."""
    group: Commit | None = None
    """On two levels: the decision of this replica's group."""


def beginning(ledger: Ledger, k: int) -> tuple[str, tuple[int, ...]]:
    """Where round ``k`` starts, as the bucket has it: the fingerprint of the state, and who averaged it."""
    last = ledger.commit(k - 1) if k else None
    if last is not None:
        return last.result, last.members
    state = ledger.state(k)
    if state is None:
        raise FellBehind(f"round {k - 1} is gone")
    return str(state.meta["fingerprint"]), ()


def limited(vectors: Sequence[FlatVector], max_norm: float | None) -> list[FlatVector]:
    """Vectors longer than ``max_norm`` times the median length, scaled down to it: one broken or dishonest replica
    cannot move the average further than the others' progress allows. It depends only on what the commit names, so
    every replica computes the same."""
    if max_norm is None or len(vectors) < 3:
        return list(vectors)
    norms = [float(v.double().norm()) for v in vectors]
    bound = max_norm * sorted(norms)[(len(norms) - 1) // 2]
    return [v * (bound / n) if n > bound else v for v, n in zip(vectors, norms, strict=True)]


def average(vectors: Sequence[FlatVector], tokens: Sequence[int], max_norm: float | None = None) -> FlatVector:
    """Σ wᵢ·vᵢ / Σ wᵢ in the order given, in fp32; w = tokens divided by their greatest common divisor. With
    ``max_norm`` every w is 1, since a replica reports its tokens itself, and ``limited`` bounds the vectors.

    With equal tokens every w is 1, and this is a plain sum and one division: gloo's arithmetic.
    """
    if max_norm is not None:
        vectors, tokens = limited(vectors, max_norm), [1] * len(tokens)
    unit = math.gcd(*tokens)
    weights = [t // unit for t in tokens] if unit else [1] * len(tokens)
    total = vectors[0] * float(weights[0])
    for vector, weight in zip(vectors[1:], weights[1:], strict=True):
        total += vector * float(weight)
    return total / float(sum(weights))


def finish_round(
    ledger: Ledger,
    rules: Rules,
    mine: Contribution,
    outcome: Callable[[FlatVector], str],
    clock: Callable[[], float],
    begin: tuple[str, tuple[int, ...]] | None = None,
) -> Generator[float, None, RoundResult]:
    """Finish round ``mine.round``. Yields the seconds to wait before the next look; ``outcome`` gives the fingerprint
    of the state that an average leads to. ``begin``: where the round starts and who is expected, None: as this ledger
    has it. Raises ``DivergedState`` or ``FellBehind`` where this replica must take the
    run's state from the bucket."""
    k = mine.round
    start, members = begin or beginning(ledger, k)
    yield 0.0
    if mine.start != start:
        raise DivergedState(f"round {k} starts from {start[:12]}, this replica from {mine.start[:12]}")
    valid: dict[tuple[int, int], tuple[FlatVector, int]] = {}
    bad: set[tuple[int, int]] = set()
    proposed: tuple[Commit, FlatVector] | None = None

    def read(whose: Sequence[tuple[int, int]]) -> None:
        for who, found in zip(whose, ledger.deltas(k, whose), strict=True):
            if found is None:
                continue
            try:
                if isinstance(found, Damaged):
                    raise found
                if found.meta.get("start") != start or found.meta.get("round") != k:
                    raise Damaged(f"{found.key} is the difference from another state")
                valid[who] = (decode(found.payload, mine.n, found.key), int(found.meta["tokens"]))
            except Damaged:
                bad.add(who)

    commit = ledger.commit(k)
    yield 0.0
    superseded, attempt = False, 0
    if commit is None:
        meta = {**mine.meta, "round": k, "replica": mine.replica, "start": start, "tokens": mine.tokens}
        superseded = not ledger.put_delta(k, mine.replica, attempt, mine.payload, meta)
        yield 0.0
        members = members or tuple(range(rules.replicas))
        began, ready = clock(), None
        while commit is None:
            commit = ledger.commit(k)
            if commit is not None:
                break
            deltas, announced = ledger.present(k)
            yield 0.0
            read([who for who in deltas if who not in valid and who not in bad])
            yield 0.0
            # replica → the first of its attempts that can be read: of equal keys the last one stays
            chosen = dict(sorted(valid, reverse=True))
            if mine.replica not in chosen and (mine.replica, attempt) in bad and attempt < ATTEMPTS:
                attempt += 1
                ledger.put_delta(k, mine.replica, attempt, mine.payload, meta)
                yield 0.0
                continue
            missing = ({*members, *announced}) - set(chosen)
            now = clock()
            if len(chosen) >= rules.quorum:
                ready = now if ready is None else ready
                if not missing or now - ready >= rules.grace:
                    ids = tuple(sorted(chosen))
                    which = [(i, chosen[i]) for i in ids]
                    tokens = tuple(valid[who][1] for who in which)
                    mean = average([valid[who][0] for who in which], tokens, rules.max_norm)
                    proposed = Commit(k, ids, tuple(chosen[i] for i in ids), tokens, start, outcome(mean)), mean
                    yield 0.0
                    commit = ledger.put_commit(proposed[0])
                    yield 0.0
                    break
            elif now - began >= rules.timeout:
                raise RoundStuck(
                    f"round {k}: {len(chosen)} of {rules.quorum} replicas sent theirs within {rules.timeout:g} s. "
                    f"Start more with `earnest worker {ledger.bucket.url}`, or lower sync.quorum."
                )
            pause = rules.pause(now - began)
            yield pause if ready is None else min(pause, max(rules.poll, ready + rules.grace - now))
    decided = list(zip(commit.members, commit.attempts, strict=True))
    read([who for who in decided if who not in valid])
    yield 0.0
    if lost := [who for who in decided if who not in valid]:
        raise FellBehind(f"the delta of replica {lost[0][0]} in round {k} can no longer be read")
    # this replica's own decision, or the same one: its average is computed already
    if proposed is not None and proposed[0] == commit:
        total = proposed[1]
    else:
        total = average([valid[who][0] for who in decided], commit.tokens, rules.max_norm)
        if outcome(total) != commit.result:
            raise DivergedState(f"round {k} leads the others to {commit.result[:12]}")
    sent = next((valid[who][0] for who in decided if who[0] == mine.replica), None)
    return RoundResult(commit, total, sent, superseded, len(bad))


def digest(tensors: Sequence[Tensor]) -> str:
    """sha256 over shapes and bytes."""
    total = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous()
        total.update(f"{tuple(flat.shape)} {flat.dtype}\n".encode())
        total.update(flat.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
