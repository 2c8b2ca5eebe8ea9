"""Real processes, real kills, a real S3 server. The tests assert that the result is the same, not only that a run ends.

Where every round has the same members as in the undisturbed run, the weights are the undisturbed run's, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from earnest.diloco.ledger import Ledger
from earnest.store import Bucket
from tests.diloco.processes import POINTS, ReplicaProcesses, commits, events, put_run, weights
from tests.diloco.servers import BUCKET, Seaweed
from tests.diloco.toy_process import toy_main

SMALL = (
    "sampling={prompts_per_step: 1, completions_per_prompt: 4, max_new_tokens: 4}",
    "checkpoint.every=1",
    "sync.every=2",
    "sync.snapshot_every=2",
    "sync.quorum=1",
)
pytestmark = pytest.mark.processes
NAMES = {f"replica-{i}": i for i in range(4)}
Plans = Callable[[int, int], Mapping[str, Any]]


class Case:
    """A run in the S3 server, and its results."""

    def __init__(self, ctx: Any, server: Seaweed, tiny: Path, place: Path, name: str, *words: str) -> None:
        place.mkdir()
        self.url, self.place, self.server = f"s3://{BUCKET}/{name}", place, server
        put_run(self.url, place, tiny, "replicas=4", *SMALL, *words)
        self.ledger = Ledger(Bucket.open(self.url))
        self.ctx = ctx
        self.fragments = 2 if "sync.fragments=2" in words else 1

    def processes(self, plans: Plans) -> ReplicaProcesses:
        return ReplicaProcesses(self.ctx, self.url, self.place, self.server.environment, plans)

    def final(self) -> dict[str, Any]:
        """The final state of each replica. What they agree on must be the same bits, and so must the adapters; with
        fragments the adapters are left out: a fragment that was not averaged in the last round is still each
        replica's own, and is lost with a replica whose duplicate finished the run."""
        found = [
            {k: v for k, v in weights(self.place / name).items() if self.fragments == 1 or not k.startswith("adapter.")}
            for name in NAMES
        ]
        for other in found[1:]:
            assert same(found[0], other)
        assert any(k.startswith("outer.global.") for k in found[0])
        return found[0]


@pytest.fixture
def case(
    ctx: Any, seaweed: Seaweed, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Case]:
    for key, value in seaweed.environment.items():
        monkeypatch.setenv(key, value)
    return lambda name, *words: Case(ctx, seaweed, tiny, tmp_path / name, f"{tmp_path.name}/{name}", *words)


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(v, other[k]) for k, v in one.items())


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="whole"),
        pytest.param(("sync.every=4", "sync.fragments=2", "sync.delay=1"), id="streaming", marks=pytest.mark.slow),
    ],
)
def test_kills_damage_duplicates_and_a_server_restart_change_nothing(
    case: Callable[..., Case], more: tuple[str, ...]
) -> None:
    """Each round waits for every replica (the grace window is long), so the member lists agree, and so must the
    weights."""
    words = ("steps=6", "sync.grace=600", "sync.wire=int8", *more)
    calm = case("calm", *words)
    calm.processes(lambda replica, life: {}).run(NAMES)
    wild = case("wild", *words)
    deaths = {0: "before the upload", 1: "after the upload", 2: "during a download", 3: "during a checkpoint"}

    def plans(replica: int, life: int) -> Mapping[str, Any]:
        if life == 1:
            more = {1: {"skew": -3600.0}, 2: {"tear": True}, 3: {"skew": 86400.0}}.get(replica, {})
            return {"die": (deaths[replica], 2), **more}
        return {}

    processes = wild.processes(plans)
    restarts = [0]

    def between() -> None:
        """After the first round the server is killed and started again on its data."""
        if not restarts[0] and wild.ledger.commit(0) is not None:
            restarts[0] = 1
            wild.server.stop()
            wild.server.start()

    processes.run({**NAMES, "duplicate": 0}, between)
    assert processes.kills >= 4 and restarts == [1]
    assert [c.members for c in commits(wild.ledger).values()] == [(0, 1, 2, 3)] * 3
    assert sum(sum(c.attempts) for c in commits(wild.ledger).values()) == 1  # the torn delta was written again
    assert same(calm.final(), wild.final())


def test_a_stall_and_bad_memory_cost_a_round_and_no_more(case: Callable[..., Case]) -> None:
    """A short grace window: rounds go on without the replica that hangs 10 s; the one whose memory is corrupted is
    restored before its numbers are averaged."""
    wild = case("stall", "steps=12", "sync.grace=0.5")

    def plans(replica: int, life: int) -> Mapping[str, Any]:
        return {0: {"stall": (1, 10.0)}, 1: {"junk": 1}}.get(replica, {})

    wild.processes(plans).run(NAMES)
    wild.final()
    members = [c.members for c in commits(wild.ledger).values()]
    assert len(members) == 6 and any(0 not in m for m in members[1:])
    healed = [line for line in events(wild.place / "replica-1") if "this replica from" in line]
    assert len(healed) == 1 and "brought back" in healed[0]


@pytest.mark.slow
def test_two_hundred_kills_of_small_replicas(ctx: Any, seaweed: Seaweed, tmp_path: Path) -> None:
    """The same with a job of 70 weights, so that 200 restarts take a minute: a kill at every point of the protocol,
    many times."""
    chance = random.Random(11)
    points = [p for p in POINTS if "checkpoint" not in p and "training" not in p]
    found, kills = {}, {}
    for name in ("calm", "wild"):
        place = tmp_path / name
        place.mkdir()

        def plans(replica: int, life: int, name: str = name) -> Mapping[str, Any]:
            if name == "calm" or kills["processes"].kills >= 200:
                return {}
            return {"die": (chance.choice(points), chance.choice((1, 1, 2)))}

        url = f"s3://{BUCKET}/{tmp_path.name}/small-{name}"
        kills["processes"] = processes = ReplicaProcesses(ctx, url, place, seaweed.environment, plans, toy_main)
        processes.run(NAMES, seconds=1800)
        found[name] = [torch.load(place / f"{replica}.pt")["weights"] for replica in NAMES]
    print(f"{processes.kills} kills in {sum(processes.lives.values())} lives")
    assert processes.kills >= 200
    for replica in [*found["calm"], *found["wild"]]:
        assert all(torch.equal(a, b) for a, b in zip(replica, found["calm"][0], strict=True))


@pytest.mark.slow
def test_two_hundred_kills(case: Callable[..., Case]) -> None:
    """Every process is killed at a random point until there were 200 kills; then the run continues to its end."""
    words = ("steps=220", "sync.every=1", "sync.grace=3600", "sync.wire=int4", "sync.snapshot_every=5")
    calm = case("calm", *words)
    calm.processes(lambda replica, life: {}).run(NAMES)
    chance = random.Random(7)
    wild = case("wild", *words)
    met: dict[str, int] = dict.fromkeys(POINTS, 0)

    def plans(replica: int, life: int) -> Mapping[str, Any]:
        if processes.kills >= 200:
            return {}
        point = chance.choice(POINTS)
        met[point] += 1
        return {"die": (point, chance.choice((1, 1, 2)))}

    processes = wild.processes(plans)
    chaos = [0]

    def between() -> None:
        if processes.kills >= 50 * (chaos[0] + 1) and chaos[0] < 3:
            chaos[0] += 1
            wild.server.stop()
            wild.server.start()

    processes.run(NAMES, between, seconds=3600)
    print(f"{processes.kills} kills, {chaos[0]} server restarts, planned {met}")
    assert processes.kills >= 200 and chaos == [3]
    assert [c.members for c in commits(wild.ledger).values()] == [(0, 1, 2, 3)] * 220
    assert same(calm.final(), wild.final())
