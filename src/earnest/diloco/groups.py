"""A round on two levels: with about √N groups a round of N replicas needs fewer than N² reads.

    groups/{g}/outer/{k}/…   the replicas i with i mod G = g finish the round among themselves: their weighted mean
    outer/{k}/delta/{g}      the group's mean, in fp32; every member writes it, the first copy counts
    outer/{k}/commit         which groups are averaged, weighted by their tokens

Both levels are the same protocol under another prefix, so each replica reads N / G + G deltas instead of N. The result
is the average of the flat layout, up to the order of additions in fp32. A late replica replays only the upper level. A
group whose members all die is left out after a grace window, like a replica. A group has no leader: all members compute
the same mean from the same commit, so any of them can write it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import replace

from earnest.diloco.ledger import Ledger
from earnest.diloco.protocol import Contribution, RoundResult, Rules, beginning, digest, finish_round
from earnest.diloco.wire import FlatVector, Wire


def of_group(ledger: Ledger, group: int) -> Ledger:
    return replace(ledger, bucket=ledger.bucket.under(f"groups/{group:05d}/"))


def rules_of(rules: Rules, groups: int) -> tuple[Rules, Rules]:
    """The rules within a group, and those among the groups. The quorum is the same share of the members on both levels,
    chosen so that a round has at least the run's quorum: share² = quorum / replicas."""
    size, share = rules.replicas // groups, math.sqrt(rules.quorum / rules.replicas)
    within, among = (min(n, math.ceil(share * n - 1e-9)) for n in (size, groups))
    return replace(rules, replicas=size, quorum=within), replace(rules, replicas=groups, quorum=among)


def finish_in_groups(
    ledger: Ledger,
    rules: Rules,
    mine: Contribution,
    groups: int,
    outcome: Callable[[FlatVector], str],
    clock: Callable[[], float],
) -> Generator[float, None, RoundResult]:
    """``finish_round`` on two levels. In the result ``commit`` lists the groups, ``group`` this group's members."""
    k, number = mine.round, mine.replica % groups
    below, (within, among) = of_group(ledger, number), rules_of(rules, groups)
    start, _ = beginning(ledger, k)
    last = below.commit(k - 1) if k else None
    members = last.members if last else tuple(range(number, rules.replicas, groups))
    own = yield from finish_round(below, within, mine, lambda mean: digest([mean]), clock, begin=(start, members))
    payload = Wire("fp32").encode(own.average, own.average)
    as_one = replace(mine, replica=number, payload=payload, tokens=sum(own.commit.tokens), meta={})
    found = yield from finish_round(ledger, among, as_one, outcome, clock)
    counted = own.sent if number in found.commit.members else None
    return replace(
        found, sent=counted, superseded=own.superseded, damaged=own.damaged + found.damaged, group=own.commit
    )
