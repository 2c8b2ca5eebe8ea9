"""Random schedules of kills, lost answers, torn uploads and interleavings, in a simulated store.

The invariants are those of earnest/diloco/protocol.py; each is checked by name below, from the history of all objects
that ever existed, by code that shares nothing with the protocol but the record formats.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from earnest.diloco.globals import OuterSGD
from earnest.diloco.outer import SyncSchedule
from earnest.diloco.wire import Wire, decode
from earnest.errors import EarnestError
from earnest.store import unseal
from tests.diloco.simulation import Job, Order, Replica, World

ORDERS: tuple[Order, ...] = ("die before", "die after", "lose the answer", "fail", "tear")
ALGORITHMS = ("diloco", "delayed", "local_sgd")
COUNTS: dict[str, int] = defaultdict(int)


class Replicas(RuleBasedStateMachine):
    """Hypothesis chooses the job and the orders; in the end every replica is started again and they continue in
    turn."""

    algorithm = ALGORITHMS[0]  # of a subclass each: left to chance one of them can come too short

    @initialize(
        replicas=st.integers(1, 3),
        rounds=st.integers(2, 4),
        grace=st.sampled_from([0.0, 2.0, 1e6]),
        snapshot_every=st.integers(1, 3),
        twin=st.booleans(),
        data=st.data(),
    )
    def begin(self, replicas: int, rounds: int, grace: float, snapshot_every: int, twin: bool, data: Any) -> None:
        algorithm = self.algorithm
        quorum = data.draw(st.integers(1, replicas), label="quorum")
        if algorithm == "local_sgd":
            schedule, wire = SyncSchedule(every=1, outer=None), Wire("fp32")
        else:
            fragments, delay = data.draw(st.integers(1, 2), label="fragments"), int(algorithm == "delayed")
            schedule = SyncSchedule(fragments * (1 + delay), fragments, delay, outer=OuterSGD(0.7, 0.9, True))
            wire = Wire(data.draw(st.sampled_from(["fp32", "bf16", "int4"]), label="wire"))
        self.job = Job(replicas, rounds, quorum, grace, snapshot_every, schedule, wire)
        self.world = World()
        self.replicas = [Replica(self.world, self.job, i) for i in range(replicas)]
        if twin:  # somebody started the same replica a second time
            self.replicas.append(Replica(self.world, self.job, replicas - 1, copy=1))
        for replica in self.replicas:
            replica.start(keep_disk=False)
        COUNTS["schedules"] += 1
        COUNTS[algorithm] += 1
        COUNTS["twin"] += twin

    def _pick(self, index: int) -> Replica:
        return self.replicas[index % len(self.replicas)]

    @rule(index=st.integers(0, 3), times=st.integers(1, 12))
    def go(self, index: int, times: int) -> None:
        for _ in range(times):
            self._pick(index).step()

    @rule(index=st.integers(0, 3), order=st.sampled_from(ORDERS))
    def disturb(self, index: int, order: Order) -> None:
        replica = self._pick(index)
        if replica.alive:
            COUNTS[order] += 1
            replica.step(order)

    @precondition(lambda self: any(not r.alive and r.final is None for r in self.replicas))
    @rule(keep_disk=st.booleans())
    def restart(self, keep_disk: bool) -> None:
        dead = next(r for r in self.replicas if not r.alive and r.final is None)
        dead.start(keep_disk)

    def teardown(self) -> None:
        if not hasattr(self, "replicas"):
            return
        try:
            self._finish()
            self._check()
        finally:
            for replica in self.replicas:
                while replica.alive:
                    replica.step("die before")

    def _finish(self) -> None:
        """Progress: with every replica back and no more faults, the run ends."""
        for _ in range(4000):
            for replica in self.replicas:
                if replica.error is not None:
                    raise replica.error
                if not replica.alive and replica.final is None:
                    replica.start(keep_disk=True)
                replica.step()
            if all(r.final is not None for r in self.replicas):
                return
        raise AssertionError([(r.number, r.alive, r.port.waiting_for) for r in self.replicas])

    def _check(self) -> None:
        # A replica that was paused during a clean-up may leave an unread delta, but must not decide a round again.
        assert not [key for key in self.world.again if key.endswith("/commit")], "durability: a round is decided once"
        finals = {r.final for r in self.replicas}
        assert len(finals) == 1, "agreement: all end in the same state"
        commits = self._commits()
        assert sorted(commits) == list(range(self.job.rounds)), "chain: no gap, no round too many"
        for k, commit in commits.items():
            assert k == 0 or commit["start"] == commits[k - 1]["result"], "chain"
            assert commit["members"] == sorted(set(commit["members"])), "validity: each replica once"
            assert len(commit["members"]) >= self.job.quorum, "validity: a quorum"
        assert commits[self.job.rounds - 1]["result"] in finals, "durability: the last commit is where all end"
        for replica in self.replicas:
            for k, fingerprint in replica.finished:
                assert fingerprint == commits[k]["result"], "agreement: whoever finished a round has its result"
        assert self.world.weights
        for key, claimed, trained in self.world.weights:
            assert claimed == trained, f"weight: {key} claims {claimed} tokens, it was trained on {trained}"
        self._recompute(commits)

    def _commits(self) -> dict[int, dict[str, Any]]:
        found = {}
        for key, data in self.world.history.items():
            if key.endswith("/commit"):
                record = json.loads(unseal(key, data).payload)
                found[record["round"]] = record
        return found

    def _recompute(self, commits: dict[int, dict[str, Any]]) -> None:
        """Validity: the end is the average of exactly the named deltas: for local SGD that average itself, otherwise by
        Nesterov's formula, written out."""
        first = unseal("state/00000000", self.world.history["state/00000000"])
        fragments = self.job.schedule.fragments
        weights = _weights(first.payload, fragments)
        momentum: list[Any] = [None] * fragments
        for k in range(self.job.rounds):
            commit, f = commits[k], k % fragments
            total = np.zeros_like(weights[f], dtype=np.float64)
            for replica, attempt, tokens in zip(commit["members"], commit["attempts"], commit["tokens"], strict=True):
                key = f"outer/{k:08d}/delta/{replica:05d}" + (f"~{attempt}" if attempt else "")
                delta = unseal(key, self.world.history[key])
                assert delta.meta["start"] == commit["start"] and delta.meta["replica"] == replica
                assert delta.meta["tokens"] == tokens, "weight: the commit has the deltas' own"
                total += tokens * decode(delta.payload, len(total)).numpy().astype(np.float64)
            g = total / sum(commit["tokens"])
            if self.job.schedule.outer is None:
                weights[f] = g
                continue
            momentum[f] = g if momentum[f] is None else 0.9 * momentum[f] + g
            weights[f] = weights[f] - 0.7 * (g + 0.9 * momentum[f])
        newest = max(k for k in self.world.history if k.startswith("state/"))
        if newest == f"state/{self.job.rounds:08d}":
            try:
                last = unseal(newest, self.world.history[newest])
            except EarnestError:
                return  # torn
            for mine, theirs in zip(weights, _weights(last.payload, fragments), strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def _weights(payload: bytes, fragments: int) -> list[Any]:
    from safetensors.numpy import load

    tensors = load(payload)
    parts = [sorted(k for k in tensors if k.startswith(f"{f}.weight.")) for f in range(fragments)]
    return [np.concatenate([tensors[k].reshape(-1).astype(np.float64) for k in names]) for names in parts]


def run_schedules(count: int) -> None:
    for algorithm in ALGORITHMS:
        run_state_machine_as_test(
            type(f"Replicas_{algorithm}", (Replicas,), {"algorithm": algorithm}),
            settings=settings(
                max_examples=-(-count // len(ALGORITHMS)),
                stateful_step_count=40,
                deadline=None,
                phases=[Phase.generate],  # a schedule is readable as it is, and shrinking threads takes minutes
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
            ),
        )


@pytest.mark.parametrize("count", [80, pytest.param(200, marks=pytest.mark.slow)])
def test_random_schedules(count: int) -> None:
    COUNTS.clear()
    run_schedules(count)
    assert COUNTS["schedules"] >= count
    assert all(COUNTS[order] > count // 5 for order in ORDERS), dict(COUNTS)  # the disturbances really happened
    assert all(COUNTS[kind] > count // 10 for kind in (*ALGORITHMS, "twin")), dict(COUNTS)
