"""The simulation for large numbers of replicas, against the protocol's own rules."""

from __future__ import annotations

import pytest
import torch

from benchmarks.diloco_scale import Fleet, simulate, table
from earnest.diloco.ledger import Ledger
from earnest.diloco.protocol import Contribution, Rules, finish_round
from earnest.diloco.wire import Wire
from earnest.errors import ConfigError
from earnest.store import Bucket


def test_the_plan_for_many_replicas_counts_right() -> None:
    """By hand for 16: flat, each replica reads 16; in 4 groups of 4, each reads 4 + 4."""
    flat, groups = simulate(Fleet(16), "flat"), simulate(Fleet(16), "groups")
    assert flat.gigabytes == pytest.approx(16 * 0.005) and groups.gigabytes == pytest.approx(8 * 0.005)
    big, small = simulate(Fleet(1000), "flat"), simulate(Fleet(1000), "groups")
    assert big.reads > 1_000_000 > 200_000 > small.reads
    assert big.meet_seconds > 100 > 10 > small.meet_seconds
    assert table().count("\n| ") == 9 + 1 - 1
    with pytest.raises(ConfigError, match="flat"):
        simulate(Fleet(4), "ring")
    assert _goodput(grace=0.0) > _goodput(grace=60.0)


def _goodput(grace: float) -> float:
    return simulate(Fleet(100, rules=Rules(100, 50, grace)), "flat").goodput


def test_the_simulation_waits_by_the_rules_of_the_protocol() -> None:
    """Its requests are counted from the real ``finish_round`` of one replica that waits for another, look by look."""
    rules, now = Rules(2, 2, grace=1e6), [0.0]
    bucket = Bucket.open("memory:///")
    ledger = Ledger(bucket)
    ledger.put_state(0, b"", "s")
    payload = Wire("fp32").encode(torch.ones(3), torch.zeros(3))
    mine = Contribution(0, 0, "s", payload, 1, 3, {})
    looks, pauses = 0, []
    meeting = finish_round(ledger, rules, mine, lambda mean: "end", lambda: now[0])
    for pause in meeting:
        if pause:
            looks, now[0] = looks + 1, now[0] + pause
            pauses.append(pause)
        if now[0] >= 30 and looks and (1, 0) not in ledger.present(0)[0]:
            ledger.put_delta(0, 1, 0, payload, {"round": 0, "start": "s", "tokens": 1})
    assert pauses[0] == 0.1 and pauses[-1] == 2.0 and pauses == sorted(pauses)
    assert looks + 1 == rules.looks(30.0) == 48  # and one look that finds it
    assert abs(rules.looks(30.0) - rules.looks(29.0)) <= 1


def test_a_round_waits_for_a_replica_that_announced_itself() -> None:
    """It is new, so the members of the last round do not include it."""
    now = [0.0]
    ledger = Ledger(Bucket.open("memory:///"))
    ledger.put_state(0, b"", "s")
    ledger.announce(0, 1)
    payload = Wire("fp32").encode(torch.ones(3), torch.zeros(3))
    mine = Contribution(0, 0, "s", payload, 1, 3, {})
    for pause in finish_round(ledger, Rules(1, 1, grace=60.0), mine, lambda mean: "end", lambda: now[0]):
        now[0] += pause
        if now[0] >= 5 and (1, 0) not in ledger.present(0)[0]:
            ledger.put_delta(0, 1, 0, payload, {"round": 0, "start": "s", "tokens": 1})
    commit = ledger.commit(0)
    assert commit is not None and commit.members == (0, 1) and now[0] < 60
