"""What a delta weighs, and what it leaves over: also after a restart, and where another life sent it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from earnest.diloco.errors import RoundStuck
from earnest.diloco.ledger import Ledger
from earnest.diloco.outer import ReplicaOuter, SyncSchedule
from earnest.diloco.protocol import average
from earnest.diloco.worker import TwoHooks
from tests.diloco.test_outer import outer_of, together
from tests.diloco.test_store import Memory
from tests.diloco.toy import ToyEngine


def test_the_delta_of_an_earlier_process_leaves_no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replica 0 dies after its upload and comes back without its folder and with other data. The round averages the
    first upload, so the new process keeps its residual. Replica 1 averages its own delta and keeps its rounding."""
    store = Memory()
    first = ToyEngine(7)
    outer_of(first, store, 0, replicas=2, quorum=2, timeout=0.02, wire="int4")
    for _ in range(3):
        first.step()
    with pytest.raises(RoundStuck):
        first.step()
    engines, left, outers = [ToyEngine(0), ToyEngine(1)], torch.full((12,), 1e-3), {}
    uploaded = threading.Event()  # replica 1 joins after it: otherwise it may commit the round before replica 0 is back
    put = Ledger.put_delta
    monkeypatch.setattr(Ledger, "put_delta", lambda *args: (put(*args), uploaded.set())[0])

    def life(i: int) -> None:
        assert i == 0 or uploaded.wait(60)
        outers[i] = outer_of(engines[i], store, i, replicas=2, quorum=2, rounds=1, wire="int4")
        outers[i].manager.residual = {0: left.clone()}
        while not outers[i].over:
            engines[i].step()

    together({i: (lambda i=i: life(i)) for i in range(2)})
    assert outers[0].manager.last["superseded"] == 1.0 and outers[1].manager.last["superseded"] == 0.0
    assert torch.equal(outers[0].manager.residual[0], left)
    assert not torch.equal(outers[1].manager.residual[0], left)


def test_a_residual_that_is_not_finite_is_dropped() -> None:
    """A residual that is not finite would break every later round; the replica is restored once, without it."""
    engine = ToyEngine(0)
    outer = outer_of(engine, Memory(), wire="int4", rounds=2, timeout=5.0)
    outer.manager.residual[0] = torch.full((12,), float("inf"))
    while not outer.over:
        engine.step()
    assert outer.heals == 1 and bool(torch.isfinite(outer.manager.residual[0]).all())


def weights_of(outer: ReplicaOuter) -> list[int]:
    """The tokens by which the only replica's deltas were weighted, by round."""
    commits = (outer.ledger.commit(k) for k in range(outer.round))
    return [c.tokens[0] for c in commits if c is not None]


@pytest.mark.parametrize(
    ("schedule", "updates"),
    [
        (SyncSchedule(4), [range(1, 5), range(5, 9), range(9, 13)]),
        (SyncSchedule(4, outer=None), [range(1, 5), range(5, 9), range(9, 13)]),
        (SyncSchedule(4, 2), [range(1, 3), range(1, 5), range(3, 7)]),
        (SyncSchedule(4, 2, 1), [range(1, 2), range(1, 4), range(3, 6)]),
        (SyncSchedule(4, 1, 1), [range(1, 4), range(5, 8), range(9, 12)]),  # update 4 is overwritten: it weighs nowhere
        (SyncSchedule(4, 1, 1, alpha=0.5), [range(1, 4), range(4, 8), range(8, 12)]),  # half of update 4 is kept
    ],
    ids=["whole", "local", "fragments", "delayed fragments", "delayed", "mixed"],
)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_delta_weighs_what_it_was_trained_on(schedule: SyncSchedule, updates: list[range], restarted: bool) -> None:
    """Update n trains on 2ⁿ tokens, so a weight names its updates: those since the delta's own fragment was last
    averaged, also where the process was started again after the first round."""
    engine = ToyEngine(0)
    engine.tokens = 1000  # trained before it came here
    outer = outer_of(engine, Memory(), schedule=schedule, rounds=3)
    done = 0
    while not outer.over:
        if restarted and outer.round == 1 and outer.between:
            again = ToyEngine(0)  # a new process: its engine counts from 0
            again.version = engine.version
            with torch.no_grad():
                for p, w in zip(again.parameters, engine.parameters, strict=True):
                    p.copy_(w)
            resumed = outer_of(again, Memory(), schedule=schedule, rounds=3)
            resumed.ledger = resumed.manager.ledger = outer.ledger
            resumed.load_state_dict(outer.state_dict())
            assert resumed.join(again)
            engine, outer, restarted = again, resumed, False
        done += 1
        engine.step(tokens=2**done)
    assert weights_of(outer) == [sum(2**n for n in part) for part in updates]


def test_who_is_brought_back_weighs_from_there_on() -> None:
    engine = ToyEngine(0)
    outer = outer_of(engine, Memory(), schedule=SyncSchedule(4, 2), rounds=3)
    for n in range(1, 4):
        engine.step(tokens=2**n)
    with torch.no_grad():
        engine.parameters[1][0] = float("nan")
    engine.outer = None
    outer.after_update(engine)  # round 1 moves the second fragment: not finite, so all is as it was after round 0
    assert outer.heals == 1 and outer.round == 1
    engine.outer = outer  # type: ignore[assignment]
    for n in range(4, 6):
        engine.step(tokens=2**n)
    assert weights_of(outer) == [2 + 4, 16 + 32]


def test_one_replica_cannot_move_the_average_further_than_the_others_progress() -> None:
    """With max_norm a delta is at most that multiple of the median length, and tokens that a replica reports itself do
    not count; with two replicas there is no majority, and nothing is scaled."""
    honest = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([0.6, 0.8])]
    liar = torch.tensor([-1e6, 0.0])
    found = average([*honest, liar], [1, 1, 1, 10**9], 2.0)
    torch.testing.assert_close(found, torch.tensor([(1.6 - 2.0) / 4, 1.8 / 4]))
    assert torch.equal(average(honest, [1, 1, 1], 2.0), average(honest, [1, 1, 1]))
    assert torch.equal(average([honest[0], liar], [1, 1], 2.0), average([honest[0], liar], [1, 1]))


class Kept:
    """An outer hook whose state is one number."""

    def __init__(self, number: float) -> None:
        self.held = torch.tensor(number)

    def after_update(self, engine: Any) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"held": self.held}

    def load_state_dict(self, state: Any) -> None:
        (self.held,) = state.values()


def test_the_replicas_and_an_averaging_teacher_keep_their_states_apart() -> None:
    state = TwoHooks(Kept(1.0), Kept(2.0)).state_dict()
    again = TwoHooks(Kept(0.0), Kept(0.0))
    again.load_state_dict(state)
    assert (float(again.first.held), float(again.then.held)) == (1.0, 2.0)  # type: ignore[attr-defined]
