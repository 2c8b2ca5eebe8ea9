"""Laws of the schedule of an asynchronous run, under every order of events that hypothesis finds: slow samplers,
deaths, lost answers, answers twice and out of order, restarts of the trainer."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from earnest.rollouts.ledger import PartTicket, RolloutLedger, TakenBatch

Content = tuple[int, int, int, int]


class Schedule(RuleBasedStateMachine):
    """Samplers and a trainer that do anything; ``trained`` is what the trainer trained on, in its order."""

    @initialize(
        staleness=st.integers(0, 6), updates=st.integers(1, 3), parts=st.integers(1, 3), samplers=st.integers(1, 4)
    )
    def begin(self, staleness: int, updates: int, parts: int, samplers: int) -> None:
        self.staleness, self.updates, self.parts, self.samplers = staleness, updates, parts, samplers
        self.version = 0
        self.ledger: RolloutLedger[Content] = self.fresh()
        self.running: list[PartTicket] = []
        self.late: list[PartTicket] = []  # given up, and may still answer
        self.trained: list[TakenBatch[Content]] = []
        self.saved = (self.ledger.state(), 0, 0)
        self.deaths = 0

    def fresh(self) -> RolloutLedger[Content]:
        return RolloutLedger(self.staleness, self.updates, self.parts, self.version)

    @precondition(lambda self: len(self.running) < self.samplers)
    @rule()
    def a_sampler_asks_for_work(self) -> None:
        ticket = self.ledger.start()
        if ticket is not None:
            assert ticket.version == self.version, "it has the newest weights"
            self.running.append(ticket)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_sampler_answers(self, data: st.DataObject) -> None:
        ticket = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        assert self.ledger.finish(ticket, content(ticket))
        self.late.append(ticket)  # the same answer may arrive again

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_sampler_dies(self, data: st.DataObject) -> None:
        ticket = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.ledger.reopen(ticket)
        self.late.append(ticket)
        self.deaths += 1

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def an_old_answer_arrives(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.late))
        assert not self.ledger.finish(ticket, content(ticket)), "nothing is counted twice"
        self.ledger.reopen(ticket)  # and its sampler's death is not counted twice

    @rule(learned=st.integers(0, 3))
    def the_trainer_trains(self, learned: int) -> None:
        taken = self.ledger.take()
        if taken is not None:
            assert all(self.version - ticket.version <= self.staleness for ticket, _ in taken.parts)
            self.trained.append(taken)
            self.version += min(learned, self.updates)  # a batch with nothing to learn from updates nothing
            self.ledger.done(self.version)

    @rule()
    def a_checkpoint_is_written(self) -> None:
        self.saved = (self.ledger.state(), self.version, len(self.trained))

    @rule()
    def the_trainer_is_killed_and_resumed(self) -> None:
        state, self.version, steps = self.saved
        del self.trained[steps:]
        self.ledger = self.fresh()
        self.ledger.restore(state, self.version)
        self.running, self.late = [], []  # their samplers are new

    @invariant()
    def every_batch_is_trained_once_and_whole(self) -> None:
        batches = [taken.batch for taken in getattr(self, "trained", [])]
        assert len(set(batches)) == len(batches)
        for taken in getattr(self, "trained", []):
            assert [found for _, found in taken.parts] == [content(ticket) for ticket, _ in taken.parts]
            assert [(t.batch, t.part) for t, _ in taken.parts] == [(taken.batch, p) for p in range(self.parts)]

    @invariant()
    def none_is_lost(self) -> None:
        """What was started is trained or open, and nothing else."""
        if hasattr(self, "ledger"):
            state = self.ledger.state()
            assert sorted([*state["open"], *(t.batch for t in self.trained)]) == list(range(state["next"]))

    def teardown(self) -> None:
        """From every state, with working samplers, the trainer goes on; without deaths nothing was sampled twice."""
        if not hasattr(self, "ledger"):
            return
        goal = len(self.trained) + 4
        for _ in range(1000):
            if len(self.trained) == goal:
                break
            while (ticket := self.ledger.start()) is not None:
                self.running.append(ticket)
            for ticket in self.running:
                self.ledger.finish(ticket, content(ticket))
            self.running = []
            self.the_trainer_trains(1)
        assert len(self.trained) == goal, "the schedule is stuck"
        self.none_is_lost()
        if not self.deaths:
            assert self.ledger.again == 0


def content(ticket: PartTicket) -> Content:
    return (ticket.batch, ticket.part, ticket.attempt, ticket.version)


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_without_staleness_sampler_and_trainer_take_turns() -> None:
    ledger: RolloutLedger[int] = RolloutLedger(0, parts=2)
    for step in range(3):
        a, b = ledger.start(), ledger.start()
        assert a is not None and b is not None and ledger.start() is None
        assert (a.batch, a.version) == (b.batch, b.version) == (step, step)
        assert ledger.finish(b, 1) and ledger.take() is None
        assert ledger.finish(a, 0)
        taken = ledger.take()
        assert taken is not None and [found for _, found in taken.parts] == [0, 1]
        assert ledger.start() is None, "the next batch is sampled with the next weights"
        ledger.done(step + 1)


def test_a_batch_is_sampled_while_the_one_before_trains() -> None:
    ledger: RolloutLedger[int] = RolloutLedger(1)
    first = ledger.start()
    assert first is not None and ledger.finish(first, 0)
    second = ledger.start()
    assert second is not None and (second.batch, second.version) == (1, 0)
    assert ledger.start() is None, "a third would be two versions old"
    assert ledger.take() is not None
    ledger.done(1)
    third = ledger.start()
    assert third is not None and (third.batch, third.version) == (2, 1)


def test_the_trainer_waits_for_a_batch_that_would_become_too_old() -> None:
    """Batch 1 is ready first, but training it would make batch 0 two versions old with a bound of 1."""
    ledger: RolloutLedger[int] = RolloutLedger(1)
    zero, one = ledger.start(), ledger.start()
    assert zero is not None and one is not None
    ledger.finish(one, 1)
    taken = ledger.take()
    assert taken is not None and taken.batch == 1
    ledger.done(1)
    two = ledger.start()
    assert two is not None and ledger.finish(two, 2)
    assert ledger.take() is None
    ledger.finish(zero, 0)
    taken = ledger.take()
    assert taken is not None and taken.batch == 0


def test_a_part_that_became_too_old_is_sampled_again() -> None:
    """As where the trainer's version moved by more than a batch adds."""
    ledger: RolloutLedger[int] = RolloutLedger(1)
    zero, one = ledger.start(), ledger.start()
    assert zero is not None and one is not None
    assert ledger.finish(zero, 0) and ledger.finish(one, 1)
    assert ledger.take() is not None
    ledger.done(5)
    assert ledger.take() is None
    again = ledger.start()
    assert again is not None and (again.batch, again.attempt, again.version) == (1, 1, 5)
    assert ledger.finish(again, 2)
    taken = ledger.take()
    assert taken is not None and taken.parts == ((again, 2),)
