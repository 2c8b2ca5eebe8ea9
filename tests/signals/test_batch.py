"""The batch: its flat order, its counts, and parts of it with all their signals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from earnest.errors import SignalError
from earnest.objectives import GRPO, Objective
from earnest.signals import Batch, FullLogits, Hidden, Reference, Teacher, TopK
from tests.objectives.support import full_batch


def test_position_t_predicts_its_target_and_the_last_token_is_one() -> None:
    batch = Batch.from_rows([[1, 2], [3]], [[4, 5], [6]], pad=9)
    assert batch.inputs.tolist() == [[1, 2, 4], [3, 9, 9]] and batch.targets.tolist() == [[2, 4, 5], [6, 9, 9]]
    assert batch.token_target.tolist() == [4, 5, 6] and batch.row.tolist() == [0, 0, 1]


@settings(max_examples=15)
@given(st.lists(st.integers(0, 10), min_size=1, max_size=8))
def test_rows_carry_every_signal_along(order: list[int]) -> None:
    """Parts of parts, repeated rows, any order: each active token keeps its own numbers."""
    batch, _ = full_batch()
    made = batch.rows(order)
    for i, r in enumerate(order):
        mine, theirs = made.row == i, batch.row == r
        for name in ("advantages", "behaviour", "proximal", "token_target", "token_weight"):
            assert torch.equal(getattr(made, name)[mine], getattr(batch, name)[theirs]), name
        assert made.reference is not None and batch.reference is not None
        assert torch.equal(made.reference.logprobs[mine], batch.reference.logprobs[theirs])  # type: ignore[index]
        assert torch.equal(made.reference.distribution.states[mine], batch.reference.distribution.states[theirs])  # type: ignore[union-attr]
        assert _taught(made, i).equal(_taught(batch, r)) and made.role[i] == batch.role[r]
    assert (made.temperature, made.max_length, made.estimator) == (batch.temperature, batch.max_length, batch.estimator)


def _taught(batch: Batch, row: int) -> torch.Tensor:
    assert batch.teacher is not None and batch.teacher.at is not None
    return batch.teacher.distribution.states[batch.row[batch.teacher.at] == row]  # type: ignore[union-attr]


def test_counts_are_of_the_tokens_that_a_term_reads() -> None:
    batch = Batch.from_rows(
        [[1]] * 3, [[2, 3, 4], [5], [6, 7]], role=("rollout", "rollout", "demonstration"), max_length=9
    )
    counts = batch.counts(("rollout",))
    assert (counts.tokens, counts.sequences, counts.max_length) == (4.0, 2, 9)
    assert Objective.of(GRPO()).counts(batch)["grpo"].left_out == 0


def test_malformed_teachers_and_distributions_are_refused() -> None:
    batch = Batch.from_rows([[1]], [[2, 3, 4]])
    logits = FullLogits(torch.zeros(2, 5))
    for make in (
        lambda: batch.with_signals(teacher=Teacher(logits)),
        lambda: Teacher(logits, torch.tensor([0, 1, 2])),
        lambda: batch.with_signals(teacher=Teacher(logits, torch.tensor([1, 0]))),
        lambda: batch.with_signals(teacher=Teacher(logits, torch.tensor([0, 3]))),
        lambda: batch.with_signals(teacher=Teacher(logits, torch.tensor([1, 1]))),
        lambda: batch.with_signals(reference=Reference(None, Hidden(torch.zeros(2, 4)))),
        lambda: TopK(torch.tensor([[0, 1]]), torch.tensor([[0.4, 0.3]]), torch.tensor([-1.0])),
        lambda: batch.with_signals(rewards=torch.zeros(3)),
        lambda: batch.with_signals(temperature=0.0),
        lambda: Batch.from_rows([[1]], [[]]),
        lambda: Batch.from_rows([[1]], [[2]], behaviour=[[-1.0, -1.0]]),
    ):
        with pytest.raises(SignalError):
            make()


def test_a_value_is_validated_once_however_often_the_batch_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy validated all values again: on a GPU five waits for the device in each step."""
    batch, _ = full_batch()
    validated: list[str] = []
    monkeypatch.setattr("earnest.signals.batch.check_logprobs", lambda name, _: validated.append(name))
    objective = Objective.of(GRPO())
    copy = batch.to("cpu").with_signals(proximal=batch.proximal).rows([0, 1, 2]).with_signals(estimator="group")
    objective.check(copy)
    objective.check(batch.rows([2, 1]))
    assert validated == ["Batch.proximal"], "only the signal that was added"
    assert copy.behaviour is not None
    copy.behaviour.mul_(2)  # changed in place: validated again once, when a term reads it
    objective.check(copy)
    objective.check(copy)
    assert validated[1:] == ["grpo: the signal 'behaviour'"]


def test_a_copy_that_changes_the_layout_is_validated_as_a_whole() -> None:
    batch, _ = full_batch()
    weight = batch.weight.clone()
    weight[0] = 0.0
    with pytest.raises(SignalError, match="must have shape"):
        batch.with_signals(weight=weight)  # its signals are laid out for the old active tokens
    with pytest.raises(SignalError, match="no active token"):
        batch.with_signals(weight=torch.zeros_like(batch.weight))
