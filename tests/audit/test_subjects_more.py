"""What subjects are asked beyond their formulas: memory, small moves, warm-ups, aliases. Defects beside right twins."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest.audit import Accumulation, Ema, Merge, OuterStep, Resume, RoundTrip, audit
from tests.audit.steps import sft_loss, sft_step


def failed(subject: Any) -> set[str]:
    return {f.subject for f in audit(subject).failures}


# --- outer steps ------------------------------------------------------------------------------------------------------


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
def test_an_outer_step_with_the_knobs_of_its_run_holds(torchs: bool, nesterov: bool, knobs: dict[str, float]) -> None:
    verdict = audit(OuterStep(DiLoCo(torchs=torchs, nesterov=nesterov), knobs))
    assert verdict.holds, str(verdict)
    forgets = failed(OuterStep(DiLoCo(anew=True, torchs=torchs, nesterov=nesterov), knobs))
    assert forgets == ({"momentum remembers"} if nesterov else {"knob momentum"})


def test_outer_knobs_of_other_names() -> None:
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

    for knobs in (
        {"outer_lr": 0.7, "outer_momentum": 0.9},
        {"outer_lr": 0.7, "outer_momentum": 0.9, "weight_decay": 0.1},
        {"weight_decay": 0.1, "max_norm": 0.3},
    ):
        verdict = audit(OuterStep(Named(), knobs))
        assert verdict.holds, str(verdict)
        assert "one replica, outer lr 1" in {f.subject for f in verdict.findings if f.outcome == "holds"}
    wrong = OuterStep(Named(-1.0), {"outer_lr": 0.7, "outer_momentum": 0.9})
    assert {"one replica, outer lr 1", "two replicas, outer lr 1"} <= failed(wrong)


def test_a_momentum_that_averages_weights_has_no_memory() -> None:
    """start·m + mean·(1 - m): stateless, and right."""
    assert audit(OuterStep(lambda s, e, momentum: torch.stack(e).mean(0).lerp(s, momentum), {"momentum": 0.9})).holds


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


# --- averages of weights ----------------------------------------------------------------------------------------------


class Warm:
    """decay = min(1 - rate, warm-up of the t-th update); ``swapped`` takes the rate for the decay."""

    def __init__(self, how: str, swapped: bool = False, in_place: bool = True) -> None:
        self.how, self.swapped, self.in_place, self.t = how, swapped, in_place, 0

    def decay(self, wanted: float) -> float:
        warm = {
            "tensorflow": (1 + self.t) / (10 + self.t),
            "diffusers": 1 - (1 + self.t) ** (-2 / 3),
            "copies first": 0.0 if self.t < 100 else 1.0,
        }[self.how]
        self.t += 1
        return min(wanted, warm)

    def __call__(self, average: Tensor, current: Tensor, rate: float) -> Tensor | None:
        decay = self.decay(rate if self.swapped else 1 - rate)
        if self.in_place:
            average.mul_(decay).add_(current, alpha=1 - decay)
            return None
        return decay * average + (1 - decay) * current


@pytest.mark.parametrize("how", ["tensorflow", "diffusers", "copies first"])
@pytest.mark.parametrize("in_place", [True, False])
def test_an_average_may_warm_up(how: str, in_place: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        verdict = audit(Ema(Warm(how, in_place=in_place), dtype=dtype))
        assert verdict.holds, str(verdict)
        right = Warm(how, in_place=in_place)
        assert audit(Ema(lambda a, c, r, u=right: u(a, c, r), dtype=dtype)).holds, "a count in a closure"
    assert {"rate 0", "rate 0.0625"} <= failed(Ema(Warm(how, swapped=True, in_place=in_place)))


def test_a_rate_that_nobody_reads_is_no_warm_up() -> None:
    class Mean:
        t = 0

        def __call__(self, average: Tensor, current: Tensor, rate: float) -> Tensor:
            self.t += 1
            return average.lerp(current, 1 / self.t)

    assert failed(Ema(Mean()))
    assert {"rate 0", "rate 1"} <= failed(Ema(lambda a, c, r: a.lerp(c, 0.1)))


MOVES = "many updates at rate "


def rounded_at_random(x: Tensor) -> Tensor:
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)) & -65536).view(torch.float32).bfloat16()


@pytest.mark.parametrize("rate", [0.5, 0.1, 0.01, 1e-3, 1e-4])
def test_an_average_in_16_bits_moves_or_is_told(rate: float) -> None:
    def plain(a: Tensor, c: Tensor, r: float) -> Tensor:
        return (1 - r) * a + r * c

    assert audit(Ema(plain, rate=rate)).holds
    assert audit(Ema(plain, rate=rate, dtype=torch.float64)).holds
    assert audit(Ema(lambda a, c, r: a.lerp_(c, r), rate=rate)).holds
    assert audit(
        Ema(lambda a, c, r: rounded_at_random(plain(a.float(), c.float(), r)), rate=rate, dtype=torch.bfloat16)
    ).holds
    stuck = failed(Ema(lambda a, c, r: a.lerp_(c, r), rate=rate, dtype=torch.bfloat16))
    if rate >= 0.1 or rate <= 1e-3:
        assert stuck == ({f"{MOVES}{rate:g}"} if rate <= 1e-3 else set())


def test_a_rate_that_is_not_declared_is_asked_for_in_16_bits() -> None:
    rows = {f.subject: f.outcome for f in audit(Ema(lambda a, c, r: a.lerp_(c, r), dtype=torch.bfloat16)).findings}
    assert rows["many updates"] == "not declared"
    assert not any(f.outcome == "not declared" for f in audit(Ema(lambda a, c, r: a.lerp_(c, r))).findings)


def test_an_average_leaves_the_current_weights_alone() -> None:
    def both(a: Tensor, c: Tensor, r: float) -> None:
        a.lerp_(c, r)
        c.copy_(a)

    def scaled(a: Tensor, c: Tensor, r: float) -> Tensor:
        return a.mul_(1 - r).add_(c.mul_(r))

    for wrong in (both, scaled):
        assert failed(Ema(wrong)) == {"the current weights afterwards"}


# --- what a call leaves behind ----------------------------------------------------------------------------------------


class Accumulate:
    """The whole batch's mean, and what is kept of the last call."""

    def __init__(self, keeps: str = "") -> None:
        self.keeps, self.calls, self.total, self.scale = keeps, 0, 0, 1.0
        self.held: list[Tensor] = []
        self.noise = torch.Generator().manual_seed(0)

    def __call__(self, model: nn.Module, batches: Any) -> None:
        counts = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
        self.total = sum(counts) + (self.total if self.keeps == "the count" else 0)
        self.calls += 1
        for batch, count in zip(batches, counts, strict=True):
            loss = sft_loss(model, batch)[0] * count / self.total
            if self.keeps == "every other call":
                loss = loss * (1 + self.calls % 2)
            if self.keeps == "a running scale":
                self.scale = 0.9 * self.scale + 0.1 * float(loss.detach())
                loss = loss / self.scale
            if self.keeps == "its own noise":
                loss = loss * (1 + 0.1 * torch.randn((), generator=self.noise))
            loss.backward()
        own = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        if self.keeps == "all gradients" and self.held:
            own = [a + b for a, b in zip(own, self.held, strict=True)]
        if self.keeps in ("all gradients", "the last gradient"):
            for p, g, old in zip(model.parameters(), own, self.held or [0 * g for g in own], strict=True):
                p.grad = g if self.keeps == "all gradients" else g + old
            self.held = own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keeps", ["", "the count", "every other call", "all gradients", "the last gradient"])
def test_accumulation_leaves_nothing_behind(keeps: str, dtype: torch.dtype) -> None:
    step = sft_step(dtype=dtype)
    seen = failed(Accumulation(step.model, Accumulate(keeps), step.batch))
    assert ("the same batch again" in seen) == bool(keeps), seen
    again = failed(Accumulation(step.model, Accumulate(keeps), step.batch, stateful=True))
    assert "the same batch again" not in again and bool(keeps) >= bool(again)


@pytest.mark.parametrize("keeps", ["a running scale", "its own noise"])
def test_noise_and_running_statistics_are_no_fault(keeps: str) -> None:
    step = sft_step()
    verdict = audit(Accumulation(step.model, Accumulate(keeps), step.batch))
    assert not verdict.failures, str(verdict)


def test_buffers_that_a_forward_pass_writes_are_no_state_of_the_accumulation() -> None:
    class Normed(nn.Module):
        size: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 1)
            self.register_buffer("size", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            out = self.lin(x / self.size)
            self.size.copy_(0.5 * self.size + 0.5 * 3.0)
            return out

    def accumulate(model: Any, batches: Any) -> None:
        rows = sum(len(b["x"]) for b in batches)
        for b in batches:
            kept = model.size.clone()
            (model(b["x"]).sum() / rows).backward()
            if b is not batches[-1]:
                model.size.copy_(kept)

    batch = {"x": torch.randn(6, 6, generator=torch.Generator().manual_seed(0))}
    assert audit(Accumulation(Normed(), accumulate, batch)).holds


@pytest.mark.parametrize("writes", [False, True])
def test_a_merge_that_writes_into_its_base_is_seen(writes: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    w, a, b = (torch.randn(s, generator=rng) for s in ((8, 8), (3, 8), (8, 3)))
    first = w.clone()

    def delta(s: float) -> Tensor:
        merged = w if writes else w.clone()
        merged += s * (b @ a)
        return merged - first

    seen = failed(Merge(delta))
    assert ("merge(1) again" in seen) == writes, seen
    other = a.clone()

    def scaled(s: float) -> Tensor:
        kept = a if writes else other.clone()
        kept.mul_(1.5)
        return s * (b @ kept)

    assert ("merge(1) again" in failed(Merge(scaled))) == writes


# --- what was saved stays as it was -----------------------------------------------------------------------------------


def shaken(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)


def held(copies: bool, kick: Any = shaken) -> RoundTrip:
    """A checkpoint that is kept in memory, of copies or of the live tensors."""
    shelf: dict[str, Any] = {}

    def save(model: nn.Module, folder: Path) -> None:
        shelf[str(folder)] = {k: v.clone() if copies else v for k, v in model.state_dict().items()}

    return RoundTrip(
        lambda: nn.Linear(4, 3), kick, save, lambda m, f: m.load_state_dict(shelf[str(f)]),
        lambda m: torch.cat([p.detach().flatten() for p in m.parameters()]),
    )  # fmt: skip


GOES_ON = "load, after the saved one went on"


def test_a_checkpoint_does_not_follow_the_live_model() -> None:
    assert audit(held(True)).holds
    assert failed(held(False)) == {GOES_ON}


def test_a_kick_that_is_always_the_same_asks_nothing() -> None:
    def always(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)

    verdict = audit(held(False, always))
    assert verdict.holds and GOES_ON not in {f.subject for f in verdict.findings}


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


@pytest.mark.parametrize("broken", [False, True])
def test_an_average_that_overwrites_its_own_decay(broken: bool) -> None:
    """diffusers #1864: the decay becomes its own complement at every update."""

    class Average:
        def __init__(self, rate: float) -> None:
            self.decay = 1 - rate

        def step(self, average: Tensor, current: Tensor) -> None:
            rate = 1 - self.decay
            if broken:
                self.decay = rate
            average.sub_(rate * (average - current))

    kept: dict[float, Average] = {}

    def update(average: Tensor, current: Tensor, rate: float) -> None:
        kept.setdefault(rate, Average(rate)).step(average, current)

    assert audit(Ema(update=update)).holds is not broken
