"""OuterStep: outer optimizers whose settings do nothing, that forget, or lose small moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest_audit import (
    OuterStep,
    audit,
)


def failed(subject: Any) -> set[str]:
    return {f.subject for f in audit(subject).failures}


class DiLoCo:
    """Outer SGD with Nesterov momentum, as torch has it (which refuses momentum 0) or by hand."""

    def __init__(self, anew: bool = False, torchs: bool = True, nesterov: bool = True) -> None:
        self.anew, self.torchs, self.nesterov, self.memory = anew, torchs, nesterov, torch.zeros(7)

    def __call__(self, start: Tensor, ends: list[Tensor], lr: float = 1.0, momentum: float = 0.0) -> Tensor:
        pseudo = start - torch.stack(ends).mean(0)
        memory = torch.zeros(7) if self.anew else self.memory
        if self.torchs:
            p = torch.nn.Parameter(start)
            p.grad = pseudo
            optimizer = torch.optim.SGD([p], lr=lr, momentum=momentum, nesterov=self.nesterov)
            optimizer.state[p]["momentum_buffer"] = memory
            optimizer.step()
            self.memory = optimizer.state[p]["momentum_buffer"]
            return p.detach()
        self.memory = momentum * memory + pseudo
        return start - lr * (pseudo + momentum * self.memory if self.nesterov else self.memory)


@pytest.mark.parametrize("torchs", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    "knobs", [{"lr": 0.7, "momentum": 0.9}, {"momentum": 0.9}, {"lr": 0.7, "momentum": 0.3}], ids=str
)
def test_an_outer_step_with_the_settings_of_its_run_holds(
    torchs: bool, nesterov: bool, knobs: dict[str, float]
) -> None:
    verdict = audit(OuterStep(DiLoCo(torchs=torchs, nesterov=nesterov), knobs))
    assert verdict.holds, str(verdict)
    forgets = failed(OuterStep(DiLoCo(anew=True, torchs=torchs, nesterov=nesterov), knobs))
    assert forgets == ({"momentum remembers"} if nesterov else {"setting momentum"})


def test_outer_settings_of_other_names() -> None:
    class Named:
        def __init__(self, sign: float = 1.0) -> None:
            self.inner, self.sign = DiLoCo(torchs=False), sign

        def __call__(self, start: Tensor, ends: list[Tensor], **k: float) -> Tensor:
            if not 0 <= k.get("outer_momentum", 0.0) < 1:
                raise ValueError("outer_momentum has to be in [0, 1)")
            ends = [start + self.sign * (e - start) for e in ends]
            moved = self.inner(start, ends, k.get("outer_lr", 1.0), k.get("outer_momentum", 0.0))
            moved = moved - k.get("weight_decay", 0.0) * start
            bound = k.get("max_norm", 1e9)
            return start + (moved - start) * (bound / (moved - start).norm()).clamp(max=1.0)

    plain = {"weight_decay": 0.0, "max_norm": 1e9}
    for knobs in (
        {"outer_lr": 0.7, "outer_momentum": 0.9},
        {"outer_lr": 0.7, "outer_momentum": 0.9, "weight_decay": 0.1},
        {"weight_decay": 0.1, "max_norm": 0.3},
    ):
        undeclared = audit(OuterStep(Named(), knobs))
        assert undeclared.holds, str(undeclared)
        verdict = audit(OuterStep(Named(), knobs, plain={k: v for k, v in plain.items() if k in knobs}))
        assert verdict.holds, str(verdict)
        assert "one replica, outer lr 1" in {f.subject for f in verdict.findings if f.outcome == "holds"}
    wrong = OuterStep(Named(-1.0), {"outer_lr": 0.7, "outer_momentum": 0.9})
    assert {"one replica, outer lr 1", "two replicas, outer lr 1"} <= failed(wrong)


def test_outer_steps_that_are_no_plain_mean_are_not_judged_as_one() -> None:
    class Adam:
        def __init__(self) -> None:
            self.m, self.v = torch.zeros(7), torch.zeros(7)

        def __call__(self, start: Tensor, ends: list[Tensor], lr: float, beta1: float, beta2: float) -> Tensor:
            pseudo = start - torch.stack(ends).mean(0)
            self.m = beta1 * self.m + (1 - beta1) * pseudo
            self.v = beta2 * self.v + (1 - beta2) * pseudo**2
            return start - lr * self.m / (self.v.abs().sqrt() + 1e-3)

    verdict = audit(OuterStep(Adam(), {"lr": 0.1, "beta1": 0.9, "beta2": 0.95}))
    assert verdict.holds and "not applicable" in {f.outcome for f in verdict.findings}


def test_a_memory_in_a_closure_is_one_too() -> None:
    held: dict[str, Tensor] = {}

    def step(start: Tensor, ends: list[Tensor], momentum: float, lr: float) -> Tensor:
        pseudo = start - torch.stack(ends).mean(0)
        held["m"] = momentum * held.get("m", torch.zeros(7)) + pseudo
        return start - lr * (pseudo + momentum * held["m"])

    assert audit(OuterStep(step, {"momentum": 0.9, "lr": 0.7})).holds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_small_outer_moves_arrive(dtype: torch.dtype) -> None:
    def kept(start: Tensor, ends: list[Tensor]) -> Tensor:
        return (start - (start - torch.stack(ends).mean(0))).to(dtype)

    coarse = dtype in (torch.bfloat16, torch.float16)
    assert ("a small move" in failed(OuterStep(kept))) == coarse
    assert audit(OuterStep(kept, precision=dtype if coarse else None)).holds


def test_what_an_outer_step_raises_as_it_is_goes_through() -> None:
    def step(start: Tensor, ends: list[Tensor]) -> Tensor:
        raise RuntimeError("no group")

    with pytest.raises(RuntimeError, match="no group"):
        audit(OuterStep(step))


def shaken(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)


class Outer:
    """Outer SGD with plain momentum, whose memory is kept (right) or made anew every round."""

    def __init__(self, anew: bool) -> None:
        self.anew, self.memory = anew, torch.zeros(7)

    def __call__(self, start: Tensor, ends: list[Tensor], momentum: float) -> Tensor:
        pseudo = start - torch.stack(ends).mean(0)
        self.memory = momentum * (torch.zeros(7) if self.anew else self.memory) + pseudo
        return start - self.memory


def test_plain_outer_momentum_acts_from_the_second_round() -> None:
    assert audit(OuterStep(Outer(False), {"momentum": 0.0})).holds
    assert failed(OuterStep(Outer(True), {"momentum": 0.0})) == {"setting momentum"}


def test_mixing_shows_where_replicas_differ() -> None:
    def mixed(start: Tensor, ends: list[Tensor], alpha: float, used: bool = True) -> Tensor:
        mean = torch.stack(ends).mean(0)
        return mean + alpha * (ends[0] - mean) if used else mean

    assert audit(OuterStep(mixed, {"alpha": 0.0})).holds
    assert failed(OuterStep(lambda s, e, alpha: mixed(s, e, alpha, False), {"alpha": 0.0})) == {"setting alpha"}


def test_replicas_that_send_16_bits_declare_it() -> None:
    def sent(start: Tensor, ends: list[Tensor]) -> Tensor:
        return start - torch.stack([(start - e).bfloat16().float() for e in ends]).mean(0)

    assert failed(OuterStep(sent))
    assert audit(OuterStep(sent, precision=torch.bfloat16)).holds


@pytest.mark.parametrize("off", [0.0, 1e-4])
def test_an_outer_step_that_is_slightly_off_is_seen(off: float) -> None:
    def step(start: Tensor, ends: list[Tensor]) -> Tensor:
        return start + (1 + off) * (torch.stack(ends) - start).mean(0)

    assert audit(OuterStep(step)).holds == (off == 0)


@pytest.mark.parametrize("lr", [1.0, 0.7])
def test_weights_that_are_kept_for_the_pseudo_gradient_are_refreshed(lr: float) -> None:
    """At outer learning rate 1 a stale backup cancels: the second round is judged at ½."""

    class Kept:
        def __init__(self, refreshed: bool) -> None:
            self.refreshed, self.backup, self.inner = refreshed, torch.empty(0), DiLoCo(torchs=False)

        def __call__(self, start: Tensor, ends: list[Tensor], lr: float, momentum: float) -> Tensor:
            self.backup = self.backup if self.backup.numel() else start
            new = self.inner(self.backup, ends, lr, momentum)
            self.backup = new if self.refreshed else self.backup
            return new

    knobs = {"lr": lr, "momentum": 0.9}
    assert audit(OuterStep(Kept(True), knobs)).holds
    assert "a second round" in failed(OuterStep(Kept(False), knobs))


@pytest.mark.parametrize("share", [1.0, 0.9])
@pytest.mark.parametrize("feedback", [False, True])
def test_what_16_bits_do_not_explain_is_seen(share: float, feedback: bool) -> None:
    """A tenth of every pseudo-gradient is lost, or rounding alone (with error feedback, too)."""

    class Sent:
        residual: Any = 0.0

        def __call__(self, start: Tensor, ends: list[Tensor], lr: float) -> Tensor:
            pseudo = start - torch.stack(ends).mean(0) + self.residual
            sent = pseudo.bfloat16().float()
            self.residual = pseudo - sent if feedback else 0.0
            return start - lr * share * sent

    verdict = audit(OuterStep(Sent(), {"lr": 0.7}, precision=torch.bfloat16))
    assert {f.outcome for f in verdict.findings if f.subject == "a small move"} == {"not applicable"}
    lands = {"one replica, outer lr 1", "two replicas, outer lr 1"}
    assert {f.subject for f in verdict.failures} == (set() if share == 1 else lands), str(verdict)
