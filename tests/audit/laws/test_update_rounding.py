"""Law GL in 16 bits: updates that rounding always loses fail; master copies, compensation and random rounding do
not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from earnest_audit import Step, Verdict, audit
from earnest_audit.laws import liveness
from tests.audit.steps import Tiny, sft_loss, sft_step


class Master(torch.optim.Optimizer):
    """fp32 copies beside parameters of 16 bits."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(list(parameters), {"lr": lr})
        self.copies = [p.detach().float().clone() for p in self.param_groups[0]["params"]]
        self.inner = torch.optim.AdamW(self.copies, lr=lr, weight_decay=0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        both = list(zip(self.copies, self.param_groups[0]["params"], strict=True))
        for mine, p in both:
            mine.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        for mine, p in both:
            p.copy_(mine)


class Compensated(torch.optim.Optimizer):
    """Sign descent; what rounding loses is kept in 16 bits and added to the next update (Kahan), or is rounded at
    random."""

    def __init__(self, parameters: Any, lr: float, way: str) -> None:
        super().__init__(parameters, {"lr": lr})
        self.way = way

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            move = -self.param_groups[0]["lr"] * p.grad.sign()
            if self.way == "Kahan":
                lost = self.state[p].setdefault("lost", torch.zeros_like(p))
                new = p + (move + lost)
                lost.copy_(move + lost - (new - p))
                p.copy_(new)
            else:
                bits = (p.float() + move.float()).view(torch.int32)
                more = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)
                p.copy_(((bits + more) & -65536).view(torch.float32))


def plain(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)


RIGHT: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "master": lambda m, lr: Master(m.parameters(), lr),
    "Kahan": lambda m, lr: Compensated(m.parameters(), lr, "Kahan"),
    "at random": lambda m, lr: Compensated(m.parameters(), lr, "at random"),
}


def judged(make: Callable[[nn.Module, float], Any], lr: float, dtype: torch.dtype = torch.bfloat16) -> Verdict:
    model, step = Tiny().to(dtype), sft_step()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = make(model, lr)
    verdict = audit(
        Step(model=model, loss=sft_loss, batch=step.batch, roles=step.roles, optimizer=optimizer), laws=[liveness.LAW]
    )
    assert all(p.equal(before[n]) and p.grad is None for n, p in model.named_parameters())
    assert not any(s for s in optimizer.state.values()), "the optimizer is as new"
    return verdict


@pytest.mark.parametrize("lr", [1e-5, 1e-4])
def test_an_update_that_is_always_rounded_away_fails(lr: float) -> None:
    """torchao #1124: at 1e-4 a bit moves in every tensor, and a tenth of the update arrives."""
    assert "updates in 16 bits" in {f.subject for f in judged(plain, lr).failures}
    assert judged(plain, lr, torch.float32).holds


@pytest.mark.parametrize("way", RIGHT)
@pytest.mark.parametrize("lr", [1e-5, 1e-3])
def test_an_update_that_is_applied_later_is_legitimate(way: str, lr: float) -> None:
    verdict = judged(RIGHT[way], lr)
    assert verdict.holds, str(verdict)


def test_a_schedule_on_the_optimizer_steps_the_copy_not_the_original() -> None:
    """A scheduler puts a bound ``step`` on its optimizer; a warm-up's first rate would arrive nowhere."""

    def warmed(model: nn.Module, lr: float) -> torch.optim.Optimizer:
        optimizer = plain(model, lr)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: (k + 1) / 1000)
        return optimizer

    rows = {f.subject: f for f in judged(warmed, 1e-3).findings}
    assert rows["updates in 16 bits"].outcome == "holds", rows["updates in 16 bits"]
