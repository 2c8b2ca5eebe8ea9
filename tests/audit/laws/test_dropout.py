"""Law FD with dropout: a checkpoint that draws another mask in its second forward fails, one that keeps it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from earnest_audit import Step, audit
from earnest_audit.laws import finite_difference
from earnest_audit.restore import with_dropout, without_dropout
from tests.audit.steps import Tiny, sft_loss, sft_step


class Dropped(nn.Module):
    def __init__(self, keeps: bool, rate: float = 0.2, noise: bool = False) -> None:
        super().__init__()
        self.base, self.drop, self.inner, self.keeps = Tiny(), nn.Dropout(rate), nn.Linear(23, 23), keeps
        self.noise = noise

    def block(self, y: Tensor) -> Tensor:
        noise = 0.1 * torch.rand_like(y) if self.noise else 0.0
        return y + self.drop(torch.tanh(self.inner(self.drop(y) + noise)))

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        y = self.base(ids, attention, documents)
        return checkpoint(self.block, y, use_reentrant=False, preserve_rng_state=self.keeps)


def rows(model: nn.Module, loss: Any = sft_loss, **more: Any) -> tuple[list[str], float]:
    step = sft_step()
    made = Step(model=model, loss=loss, batch=step.batch, roles=step.roles, **more)
    verdict = audit(made, laws=[finite_difference.LAW])
    found = [f.outcome for f in verdict.findings if f.subject == finite_difference.DROPOUT]
    return found, verdict.cost


@pytest.mark.parametrize("seed", range(3))
def test_a_mask_that_is_drawn_again_is_seen(seed: int) -> None:
    """OLMo-core #828."""
    torch.manual_seed(seed)
    assert rows(Dropped(False), seed=seed)[0] == ["fails"]
    assert rows(Dropped(True), seed=seed)[0] == ["holds"]


def test_it_costs_two_evaluations_and_nothing_without_dropout() -> None:
    without, usual = rows(Dropped(True, 0.0))
    assert without == [] and rows(Dropped(True))[1] <= usual + 1 + 2 / 3 + 1e-9


def test_what_is_off_without_dropout_too_is_not_its_fault() -> None:
    def half(model: nn.Module, batch: Any) -> Tensor:
        loss = sft_loss(model, batch)[0]
        return loss + loss.detach()

    assert rows(Dropped(True), half)[0] == ["not applicable"]
    assert rows(Dropped(True, noise=True))[0] == ["holds"], "a random step draws the same numbers from the same seed"
    assert rows(Dropped(False), value_is_loss=False)[0] == []


def test_rates_are_the_users_inside_and_0_outside() -> None:
    model = Dropped(True)
    with without_dropout(model) as rates:
        assert len(rates) == 1 and model.drop.p == 0.0
        with with_dropout(rates):
            assert model.drop.p == 0.2
        assert model.drop.p == 0.0
    assert model.drop.p == 0.2
