"""``AuditCallback`` on released trainers: no alarm, the same run with and without it; a broken trainer fails."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from earnest_audit import AuditCallback, LawBroken, StepError, WatchWarning
from tests.audit.trainers import cases as trainer_cases
from tests.audit.trainers.cases import TRAINERS, plain

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


NAMES = list(TRAINERS)


def audited(name: str, folder: Path, seed: int, **more: Any) -> AuditCallback:
    callback = AuditCallback()
    with warnings.catch_warnings():
        warnings.simplefilter("error", WatchWarning)
        TRAINERS[name](folder, seed, torch.float32, [callback], **more).train()
    return callback


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_released_trainer_raises_nothing(name: str, bf16: bool, tmp_path: Path) -> None:
    callback = audited(name, tmp_path, int(bf16), bf16=bf16)
    assert callback.audited is not None and callback.audited.holds
    verdict = callback.verdict()
    assert verdict.holds, str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 20))
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_no_false_alarm_over_seeds(name: str, bf16: bool, seed: int, tmp_path: Path) -> None:
    verdict = audited(name, tmp_path, seed, bf16=bf16).verdict()
    assert verdict.holds, str(verdict)


def test_the_run_is_the_same_run(tmp_path: Path) -> None:
    weights = []
    for callbacks in ([], [AuditCallback(quick=True)]):
        trainer = plain(tmp_path, 0, torch.float32, callbacks)
        trainer.train()
        weights.append([p.detach() for p in trainer.model.parameters()])
        assert "compute_loss" not in vars(trainer), "the trainer has its own method back"
    assert all(a.equal(b) for a, b in zip(*weights, strict=True))


def test_norms_that_cannot_move_in_16_bits_are_seen(tmp_path: Path) -> None:
    """Parameters kept in bf16: a norm's weight of 1 plus 1e-3 is 1 again."""
    callback = AuditCallback(quick=True)
    plain(tmp_path, 0, torch.bfloat16, [callback]).train()
    assert callback.audited is not None
    (failure,) = callback.audited.failures
    assert failure.law == "GL" and "norm" in failure.meaning


def test_left_padding_trains_the_first_token_from_a_pad(tmp_path: Path) -> None:
    """docs/findings/left-padding.md"""
    callback = AuditCallback()
    plain(tmp_path, 0, torch.float32, [callback], side="left").train()
    assert callback.audited is not None
    seen = {(f.law, f.subject) for f in callback.audited.failures}
    padded = ("MI", "3 more columns of padding on the left")
    assert seen == {("MI", "ids where masked"), padded}


def test_left_padding_without_that_label_raises_nothing(tmp_path: Path) -> None:
    callback = AuditCallback(quick=True)
    trainer = plain(tmp_path, 0, torch.float32, [callback], side="left")
    collate = trainer.data_collator

    def without(rows: Any) -> Any:
        batch = collate(rows)
        first = batch["attention_mask"].cumsum(-1) == 1
        batch["labels"][first & (batch["attention_mask"] == 1)] = -100
        return batch

    trainer.data_collator = without
    trainer.train()
    assert callback.audited is not None and callback.audited.holds, str(callback.audited)
    found = {f.subject: f.outcome for f in callback.audited.findings}
    assert found["3 more columns of padding on the left"] == "holds"


def test_a_broken_trainer_is_seen_before_the_first_update(tmp_path: Path) -> None:
    callback = AuditCallback(stop=True)
    trainer = plain(tmp_path, 0, torch.float32, [callback])
    own = type(trainer).compute_loss

    class Broken(type(trainer)):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
            return own(self, model, {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}, **more)

    trainer.__class__ = Broken
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(LawBroken, match="attention"):
        trainer.train()
    assert all(a.equal(b) for a, b in zip(before, trainer.model.parameters(), strict=True))


class Refuses:
    """A trainer's loss that raises at these calls."""

    def __init__(self, trainer: Any, at: range) -> None:
        own, self.calls = type(trainer).compute_loss, 0

        def compute_loss(this: Any, model: Any, inputs: Any, **more: Any) -> Any:
            self.calls += 1
            if self.calls in at:
                raise RuntimeError("out of memory")
            return own(this, model, inputs, **more)

        trainer.__class__ = type("Refusing", (type(trainer),), {"compute_loss": compute_loss})


@pytest.mark.may_not_be_checked
def test_an_audit_that_cannot_be_made_does_not_end_the_run(tmp_path: Path) -> None:
    callback = AuditCallback(quick=True)
    trainer = plain(tmp_path, 0, torch.float32, [callback])
    Refuses(trainer, range(1, 2))
    with pytest.warns(WatchWarning, match=r"the audit could not be checked \(RuntimeError: out of memory\)"):
        trainer.train()
    assert trainer.state.global_step == 6 and callback.watch is not None
    (row,) = callback.verdict().errors
    assert row.subject == "the audit" and row.meaning == "The audit raised, and the run goes on without it."
    stopped = plain(tmp_path, 0, torch.float32, [AuditCallback(quick=True, stop=True)])
    Refuses(stopped, range(1, 2))
    with pytest.raises(RuntimeError, match="out of memory"):
        stopped.train()


@pytest.mark.may_not_be_checked
def test_laws_that_cannot_be_checked_are_rows(tmp_path: Path) -> None:
    callback = AuditCallback(quick=True)
    trainer = plain(tmp_path, 0, torch.float32, [callback])
    Refuses(trainer, range(4, 8))
    trainer.train()
    assert callback.audited is not None and callback.audited.errors and trainer.state.global_step == 6
    assert any(f.outcome == "holds" for f in callback.audited.findings)


def test_without_a_trainer_it_says_so() -> None:
    with pytest.raises(StepError, match="for a bare loop use"):
        AuditCallback().on_train_begin(None, None, None)


def weighted(folder: Path, ask: str, callback: AuditCallback, **more: Any) -> Any:
    """A dataset with a column that the model's forward does not take."""
    trainer = plain(folder, 0, torch.float32, [callback], **more)
    rows = trainer.train_dataset
    trainer.train_dataset = rows.add_column("weights", [1.0 + i % 2 for i in range(len(rows))])
    own = type(trainer).compute_loss

    def compute_loss(this: Any, model: Any, inputs: Any, **more: Any) -> Any:
        inputs = dict(inputs) if ask == "never" else inputs
        weights = None
        if ask == "get":
            weights = inputs.get("weights")
        elif ask == "pop":
            weights = inputs.pop("weights", None)
        elif ask == "in" and "weights" in inputs:
            weights = inputs.pop("weights")
        inputs = {k: v for k, v in inputs.items() if k != "weights"}
        loss = own(this, model, inputs, **more)
        return loss if weights is None else loss + 0.0 * weights.sum()

    trainer.__class__ = type("Weighted", (type(trainer),), {"compute_loss": compute_loss})
    return trainer


@pytest.mark.parametrize("ask", ["get", "pop", "in", "never"])
@pytest.mark.parametrize("removed", [True, False])
def test_a_column_that_must_be_declared_and_was_dropped_is_reported(ask: str, removed: bool, tmp_path: Path) -> None:
    callback = AuditCallback(quick=True)
    weighted(tmp_path, ask, callback, remove_unused_columns=removed, max_steps=1).train()
    assert callback.audited is not None and callback.audited.holds, str(callback.audited)
    found = {f.subject: f.outcome for f in callback.audited.findings if f.subject.startswith("column")}
    assert found == ({"column weights": "not declared"} if removed and ask != "never" else {})


def by_attention(rows: Any) -> Any:
    words = trainer_cases.tokenizer()
    batch = words.pad([{k: v for k, v in row.items() if k != "labels"} for row in rows], return_tensors="pt")
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("shared", [True, False], ids=["pad is eos", "pad is another"])
def test_ends_that_are_masked_as_padding_are_seen(
    shared: bool, side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share(monkeypatch, shared)
    outcomes = {}
    for collator in (None, by_attention):
        callback = AuditCallback(quick=True)
        trainer = plain(tmp_path, 0, torch.float32, [callback], side=side)
        trainer.data_collator = collator or trainer.data_collator
        trainer.processing_class = trainer_cases.tokenizer(side)
        trainer.train()
        assert callback.watch is not None
        found = {f.subject: f.outcome for f in callback.watch.verdict().findings}
        outcomes[collator] = found.get("ends of answers, supervised")
    assert outcomes == ({None: "fails", by_attention: "holds"} if shared else {None: None, by_attention: None})


def share(monkeypatch: pytest.MonkeyPatch, shared: bool) -> None:
    """The tokenizer's padding becomes its end token."""
    own = trainer_cases.tokenizer

    def tokenizer(side: str = "right") -> Any:
        words = own(side)
        if shared:
            words.pad_token = words.eos_token
        return words

    monkeypatch.setattr(trainer_cases, "tokenizer", tokenizer)


@pytest.mark.parametrize("name", ["SFT", "GKD"])
def test_released_trainers_supervise_their_ends(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share(monkeypatch, True)
    callback = AuditCallback(quick=True)
    TRAINERS[name](tmp_path, 0, torch.float32, [callback]).train()
    assert callback.watch is not None
    found = {f.subject: f.outcome for f in callback.watch.verdict().findings}
    assert found.get("ends of answers, supervised") in ("holds", None)
