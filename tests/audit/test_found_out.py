"""What an audit finds out by itself: the precision of autocast, what a forward pass writes down, and its own budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from earnest.audit import Step, audit
from earnest.audit.probe import Probe
from tests.audit.steps import Tiny, policy_step, sft_loss, sft_step


def test_autocast_is_seen_and_is_no_fault() -> None:
    """In fp32's room the same step fails; broken under autocast it fails all the same."""
    step = sft_step()
    plain = step.loss

    def cast(model: Any, batch: Mapping[str, Any], **knobs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain(model, batch, **knobs)

    step.loss = cast
    verdict = audit(step)
    assert verdict.holds, str(verdict)
    assert any("compute in bfloat16" in note for note in verdict.notes)
    step.loss = lambda model, batch: cast(model, {**batch, "labels": batch["labels"].roll(1, 0)})
    assert not audit(step).holds
    assert not any("compute in" in note for note in audit(sft_step(), quick=True).notes)


class Centred(Tiny):
    """Subtracts a running mean of its outputs, which every forward pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        y = super().forward(ids, attention, documents)
        with torch.no_grad():
            self.centre.mul_(0.5).add_(0.5 * y.mean())
            self.calls = self.calls + 1  # replaced, not written into
        return y * (1 + self.centre)


def test_what_a_forward_pass_writes_does_not_reach_the_next_one() -> None:
    step, model = sft_step(), Centred()
    step.model, step.loss = model, sft_loss
    probe = Probe(step)
    with probe.open():
        first, again = probe.gradient(dict(step.batch)), probe.gradient(dict(step.batch))
        assert first.distance(again) == 0
        assert float(model.calls) == 1, "one pass since they were put back"
    assert float(model.calls) == 0 and float(model.centre) == 0


class Normalised(Tiny):
    """Statistics of the batch, and running ones that the backward pass must find as the forward pass left them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(super().forward(torch.zeros(1, 2, dtype=torch.long)).shape[-1])

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return self.norm(super().forward(ids, attention, documents).flatten(0, 1)).reshape(*ids.shape, -1)


def test_running_statistics_do_not_disturb_the_backward_pass() -> None:
    step = sft_step()
    step.model, step.loss, step.rows_interact = Normalised(), sft_loss, True
    verdict = audit(step, quick=True)
    assert not verdict.errors, str(verdict)


def test_the_budget_is_the_promise() -> None:
    step = policy_step()
    probe = Probe(step)
    declared = len(step.roles) + len(step.knobs) + len(step.terms) + sum(map(len, step.options.values()))
    assert probe.budget == 20 + 2 * declared
    probe.cost = probe.budget - 5
    assert probe.afford(1) and not probe.afford(2)


class Scored(Tiny):
    """A reward model; the bias of its head is added to both answers, and cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.score = torch.nn.Linear(23, 1)


def test_a_bias_that_cancels_in_every_pair_is_said_and_no_fault() -> None:
    def loss(model: Any, batch: Mapping[str, Any]) -> Tensor:
        chosen, rejected = (model.score(model(batch[side])[:, -1]) for side in ("chosen", "rejected"))
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean()

    rng = torch.Generator().manual_seed(0)
    batch = {side: torch.randint(1, 23, (4, 6), generator=rng) for side in ("chosen", "rejected")}
    step = Step(model=Scored(), loss=loss, batch=batch, roles={"chosen": "chosen", "rejected": "rejected"})
    verdict = audit(step)
    assert verdict.holds, str(verdict)
    assert any("head.bias, score.bias cancels in every pair" in f.measured for f in verdict.findings)
