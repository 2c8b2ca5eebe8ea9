"""Resume: a run that continues from a checkpoint is the run that was not stopped."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest_audit import (
    Resume,
    audit,
)


def failed(subject: Any) -> set[str]:
    return {f.subject for f in audit(subject).failures}


class Dropped:
    """A run whose dropout draws from the global generator, and whose model is made without a seed of its own."""

    def __init__(self, epoch: int = 100) -> None:
        self.model = nn.Sequential(nn.Embedding(23, 8), nn.Dropout(0.2), nn.Linear(8, 23))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.place, self.epoch, self.left = 0, epoch, 10**6

    def go(self, steps: int) -> list[int]:
        seen = []
        for _ in range(steps):
            ids = torch.randint(0, 23, (4, 8), generator=torch.Generator().manual_seed(self.place % self.epoch))
            F.cross_entropy(self.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen.append(self.place % self.epoch)
            self.place += 1
        return seen

    def save(self, folder: Path) -> None:
        state = (self.model.state_dict(), self.optimizer.state_dict(), self.place, torch.get_rng_state())
        torch.save(state, folder / "run")

    def load(self, folder: Path, generator: bool) -> None:
        model, optimizer, self.place, rng = torch.load(folder / "run")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        if generator:
            torch.set_rng_state(rng)


def resume(generator: bool, epoch: int = 100) -> Resume:
    def state(run: Dropped) -> Tensor:
        return torch.cat([p.detach().flatten() for p in run.model.parameters()])

    return Resume(lambda: Dropped(epoch), Dropped.go, Dropped.save, lambda r, f: r.load(f, generator), state)


def test_a_resume_starts_from_one_generator_state_and_leaves_it() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert audit(resume(True)).holds
    assert any("6 steps" in s for s in failed(resume(False)))
    assert torch.get_rng_state().equal(before)


def test_a_resume_says_where_no_epoch_ended() -> None:
    rows = {epoch: {f.subject for f in audit(resume(True, epoch)).findings} for epoch in (2, 4, 9, 100)}
    assert "the end of an epoch" in rows[100] and not any("the end of an epoch" in rows[e] for e in (2, 4, 9))
    assert [any(s.startswith("6 + ") or " = 6 + " in s for s in rows[e]) for e in (2, 4, 9)] == [False, True, False]


class Epochs(Dropped):
    """Data in another order in each epoch; the count of epochs is lost in a resume, or is not."""

    def go(self, steps: int) -> list[int]:
        seen = []
        for _ in range(steps):
            epoch, at = divmod(self.place, 4)
            seen.append(int(torch.randperm(4, generator=torch.Generator().manual_seed(epoch))[at]))
            self.place += 1
        return seen


@pytest.mark.parametrize("left", [9, 14])
def test_data_that_end_in_a_longer_run_are_no_failure(left: int) -> None:
    """A declaration that has data for a number of steps after a load, and no error where they end."""
    subject = resume(True, 5)
    subject.steps = 4
    inner = subject.load

    def load(run: Dropped, folder: Path) -> None:
        inner(run, folder)
        run.left = left - run.place

    def go(run: Dropped, steps: int) -> list[int]:
        return Dropped.go(run, min(steps, run.left))

    subject.load, subject.run = load, go
    verdict = audit(subject)
    rows = {f.subject for f in verdict.findings}
    assert verdict.holds and ("12 steps = 8 + resume + 4" in rows) == (left == 14)
    assert ("the end of an epoch" in rows) == (left == 9)


@pytest.mark.parametrize("steps", [3, 4, 5])
@pytest.mark.parametrize("lost", [True, False])
def test_an_epoch_ends_before_the_save(lost: bool, steps: int) -> None:
    def load(run: Epochs, folder: Path) -> None:
        run.load(folder, True)
        run.place -= 4 * (run.place // 4) * lost

    subject = Resume(lambda: Epochs(4), Epochs.go, Epochs.save, load, lambda r: torch.zeros(1), steps)
    assert failed(subject) == ({"the data after a resume"} if lost else set())


def test_a_run_that_cannot_go_on_says_so() -> None:
    def go(run: Dropped, steps: int) -> list[int]:
        if run.place + steps > 6:
            raise StopIteration
        return Dropped.go(run, steps)

    subject = resume(True)
    subject.run = go
    (row,) = (f for f in audit(subject).findings if f.subject == "the end of an epoch")
    assert row.outcome == "not applicable" and "StopIteration" in row.measured


class Momentum:
    def __init__(self) -> None:
        self.w, self.place = torch.zeros(5, requires_grad=True), 0
        self.optimizer = torch.optim.SGD([self.w], lr=0.1, momentum=0.9)

    def go(self, steps: int) -> list[int]:
        seen = list(range(self.place, self.place + steps))
        for place in seen:
            goal = torch.randn(5, generator=torch.Generator().manual_seed(place))
            ((self.w - goal) ** 2).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.place += steps
        return seen


@pytest.mark.parametrize("kept", ["copies", "the live weights", "files"])
def test_a_resume_comes_from_what_was_saved(kept: str) -> None:
    shelf: dict[str, Any] = {}

    def save(run: Momentum, folder: Path) -> None:
        state = (run.w.detach(), run.optimizer.state_dict(), run.place)
        if kept == "files":
            torch.save(state, folder / "run")
        shelf[str(folder)] = state if kept == "the live weights" else copy.deepcopy(state)

    def load(run: Momentum, folder: Path) -> None:
        w, optimizer, run.place = torch.load(folder / "run") if kept == "files" else shelf[str(folder)]
        with torch.no_grad():
            run.w.copy_(w)
        run.optimizer.load_state_dict(copy.deepcopy(optimizer))

    seen = failed(Resume(Momentum, Momentum.go, save, load, lambda r: r.w.detach()))
    assert seen == ({"load, after the saved run went on"} if kept == "the live weights" else set())


class Toy:
    """A run on plain numbers, with momentum."""

    def __init__(self) -> None:
        self.weight, self.momentum, self.place = torch.zeros(3), torch.zeros(3), 0

    def go(self, steps: int, rate: float = 1.0) -> list[int]:
        for _ in range(steps):
            self.momentum = 0.9 * self.momentum + torch.arange(3.0) + self.place
            self.weight = self.weight - rate * self.momentum
            self.place += 1
        return list(range(self.place - steps, self.place))

    def save(self, folder: Path) -> None:
        torch.save(vars(self), folder / "run")

    def load(self, folder: Path) -> None:
        vars(self).update(torch.load(folder / "run"))

    def load_without_momentum(self, folder: Path) -> None:
        vars(self).update({**torch.load(folder / "run"), "momentum": torch.zeros(3)})


@pytest.mark.parametrize("run", [Toy.go, lambda x, n: torch.tensor(x.go(n)), lambda x, n: [*torch.tensor(x.go(n))]])
@pytest.mark.parametrize(
    "state", [lambda x: x.weight, lambda x: [x.weight, x.momentum], lambda x: {"m": {"w": x.weight}, "n": x.place}]
)
def test_a_state_is_a_tensor_or_holds_some_and_ids_may_be_tensors(run: Any, state: Any) -> None:
    assert audit(Resume(Toy, run, Toy.save, Toy.load, state)).holds
    wrong = audit(Resume(Toy, run, Toy.save, Toy.load_without_momentum, state)).failures
    assert wrong[0].subject == "6 steps = 3 + resume + 3"
    assert "m.w" in wrong[0].measured or not isinstance(state(Toy()), dict)


def test_a_run_has_to_train() -> None:
    """Otherwise a resume that loses everything would pass. Where the run returns data, that may be all that resumes."""

    def still(run: Toy, steps: int) -> list[int]:
        return run.go(steps, rate=0.0)

    subject = "6 steps = 3 + resume + 3"
    silent = audit(Resume(Toy, lambda x, n: still(x, n)[:0], Toy.save, Toy.load, lambda x: x.weight))
    assert not silent.holds and subject in {f.subject for f in silent.failures}
    assert {f.outcome for f in silent.findings if "data" in f.subject} == {"not declared"}
    verdict = audit(Resume(Toy, still, Toy.save, Toy.load, lambda x: x.weight))
    assert verdict.holds and subject in {f.subject for f in verdict.warnings}
    assert not audit(Resume(Toy, still, Toy.save, Toy.load, lambda x: [])).warnings, "declared: the data alone"
