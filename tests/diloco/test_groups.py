"""Two levels: groups average first, then their means; the result is that of one level."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from earnest.diloco.groups import of_group, rules_of
from earnest.diloco.ledger import Ledger
from earnest.diloco.outer import SyncSchedule
from earnest.diloco.protocol import Rules
from earnest.store import Bucket
from tests.diloco.test_outer import outer_of, together, train
from tests.diloco.test_store import Memory
from tests.diloco.toy import ToyEngine

TOKENS = {0: 10, 1: 20, 2: 50, 3: 5, 4: 16, 5: 16}


class Counted(Memory):
    """Counts the deltas that are read: key → times."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def get(self, key: str) -> bytes | None:
        if "/delta/" in key:
            self.read.append(key)
        return super().get(key)


@pytest.mark.parametrize("groups", [2, 3])
def test_the_result_is_that_of_one_level(groups: int) -> None:
    """With unequal tokens a mean of group means would be another number; the groups are weighted by their tokens."""
    flat = train(Memory(), 6, TOKENS, quorum=6)
    grouped = train(Memory(), 6, TOKENS, quorum=6, groups=groups)
    assert all(torch.equal(grouped[0].flat(), e.flat()) for e in grouped)
    torch.testing.assert_close(grouped[0].flat(), flat[0].flat(), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(flat[0].flat(), train(Memory(), 6, quorum=6)[0].flat(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wire", ["int4", "sparseloco"])
def test_a_lossy_wire_feeds_back_what_its_group_did_not_read(wire: str) -> None:
    engines = train(Memory(), 4, wire=wire, quorum=4, groups=2)
    assert all(torch.equal(engines[0].flat(), e.flat()) for e in engines)
    assert all(float(e.outer.manager.residual[0].norm()) > 0 for e in engines)  # type: ignore[attr-defined]


def test_a_replica_reads_its_group_and_the_groups() -> None:
    """Nine replicas, one round: 9 · 9 deltas on one level, 9 · (3 + 3) on two."""
    flat, grouped = Counted(), Counted()
    train(flat, 9, quorum=9, rounds=1)
    train(grouped, 9, quorum=9, rounds=1, groups=3)
    # a create that finds the group's mean there compares it with its own: 6 of 9 members are not the first
    means = sum(key.startswith("outer/") for key in grouped.read)
    assert len(flat.read) == 81 and len(grouped.read) - means == 27 and 27 <= means <= 27 + 6


def test_a_group_that_died_is_left_out_and_a_late_replica_arrives() -> None:
    """Replicas 0 and 2 are group 0; group 1 (1 and 3) never begins. Replica 1 joins after the third round."""
    store, engines = Memory(), {i: ToyEngine(i) for i in (0, 2)}

    def live(i: int) -> Any:
        def run() -> None:
            outer = outer_of(engines[i], store, i, replicas=4, quorum=1, grace=0.05, rounds=3, groups=2)
            while not outer.over:
                engines[i].step()

        return run

    together({i: live(i) for i in engines})
    ledger = Ledger(Bucket(store))
    commit, own = ledger.commit(2), of_group(ledger, 0).commit(2)
    assert commit is not None and commit.members == (0,) and own is not None and own.members == (0, 2)
    late = ToyEngine(1)
    joined = outer_of(late, store, 1, replicas=4, quorum=1, grace=0.05, rounds=4, groups=2)
    assert joined.round == 3 and torch.equal(late.flat(), engines[0].flat())
    while not joined.over:
        late.step()
    after = ledger.commit(3)
    assert after is not None and after.members == (1,)


def test_old_rounds_of_a_group_are_removed() -> None:
    store = Memory()
    train(store, 4, quorum=4, groups=2, rounds=8, schedule=SyncSchedule(1), snapshot_every=2)
    below = of_group(Ledger(Bucket(store)), 0)
    assert below.present(0) == ([], []) and below.present(7)[0] == [(0, 0), (2, 0)]
    assert all(below.commit(k) is not None for k in range(8))


@pytest.mark.parametrize(("replicas", "quorum", "groups"), [(16, 8, 4), (16, 16, 4), (16, 1, 4), (12, 7, 3), (6, 5, 2)])
def test_the_quorums_of_both_levels_make_the_quorum_of_the_run(replicas: int, quorum: int, groups: int) -> None:
    within, among = rules_of(Rules(replicas, quorum), groups)
    assert within.quorum * among.quorum >= quorum
    assert within.quorum <= within.replicas == replicas // groups and among.quorum <= among.replicas == groups
