"""Rows 4, 12, 13, 15, 19 to 26, 28 to 30: advantages, accumulation, replicas, adapters, precision, resuming,
schedules."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from earnest_audit import (
    Accumulation,
    AdvantageEstimator,
    Census,
    Gather,
    OuterStep,
    Resume,
    Schedule,
    Step,
    Unbiased,
    WeightSync,
)
from tests.audit.corpus.base import defect
from tests.audit.steps import Tiny, sft_loss, sft_step


def group_mean(rewards: Tensor, groups: Tensor) -> Tensor:
    return torch.stack([rewards[groups == g].mean() for g in groups])


def centred(rewards: Tensor, groups: Tensor) -> Tensor:
    return rewards - group_mean(rewards, groups)


@defect(
    "4a",
    "one sample a prompt: every advantage is 0 and nothing is learned",
    "ADV",
    lambda: AdvantageEstimator(centred, "equal"),
)
def _() -> AdvantageEstimator:
    return AdvantageEstimator(centred, "equal", groups=6, size=1)


def normalised(rewards: Tensor, keepdim: bool) -> Tensor:
    """Whitening of [B, B] per-token rewards over each row; without keepdim the statistics run along the wrong axis."""
    table = rewards[:, None] * torch.linspace(0.5, 1.5, len(rewards))[None]
    mean, std = table.mean(-1, keepdim=keepdim), table.std(-1, keepdim=keepdim)
    return ((table - mean) / (std + 1e-6)).sum(-1) + rewards - rewards.mean()


@defect("4b", "masked_normalize lacks keepdim: statistics broadcast along the wrong axis", "SE ADV",
        lambda: AdvantageEstimator(lambda r, _: normalised(r, True), "equal", over="batch"))  # fmt: skip
def _() -> AdvantageEstimator:
    return AdvantageEstimator(lambda r, _: normalised(r, False), "equal", over="batch")


def accumulation(kind: str) -> Accumulation:
    def run(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> None:
        total = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
        for b in batches:
            if kind == "cleared":
                model.zero_grad()
            mine = int((b["labels"][:, 1:] != -100).sum())
            loss = sft_loss(model, b)[0]
            (loss / len(batches) if kind == "mean of means" else loss * (mine / total)).backward()

    step = sft_step()
    return Accumulation(step.model, run, step.batch)


@defect(
    "12", "accumulation takes the mean of the micro-batches' means", "SE-ACCUMULATION", lambda: accumulation("right")
)
def _() -> Accumulation:
    return accumulation("mean of means")


@defect(
    "13",
    "gradients are cleared at every forward_backward: only the last request trains",
    "SE-ACCUMULATION",
    lambda: accumulation("right"),
)
def _() -> Accumulation:
    return accumulation("cleared")


def outer(start: Tensor, locals_: list[Tensor], alpha: float = 0.0, *, sign: int = +1, in_place: bool = True) -> Tensor:
    pseudo = start - torch.stack(locals_).mean(0)
    new = start - sign * pseudo
    mixed = locals_[0].clone()
    if in_place:
        return mixed.lerp_(new, 1 - alpha)
    mixed.lerp(new, 1 - alpha)  # the result is discarded
    return new


@defect("15a", "the pseudo-gradient is local - global: the outer step moves away", "OUTER KG", lambda: OuterStep(outer))
def _() -> OuterStep:
    return OuterStep(lambda s, ls, **k: outer(s, ls, sign=-1, **k))


def mixing(in_place: bool) -> OuterStep:
    def step(start: Tensor, locals_: list[Tensor], alpha: float = 0.0) -> Tensor:
        new = torch.stack(locals_).mean(0)
        if in_place:
            new.lerp_(start, alpha)
        else:
            new.lerp(start, alpha)  # the result is discarded
        return new

    return OuterStep(step, knobs={"alpha": 0.0})


@defect("15b", "lerp is not in place: mixing does nothing", "OUTER KG", lambda: mixing(True))
def _() -> OuterStep:
    return mixing(False)


def sync(adapter_too: bool) -> WeightSync:
    trainer, sampler = Tiny(), Tiny()
    trainer.lora, sampler.lora = nn.Linear(23, 23, bias=False), nn.Linear(23, 23, bias=False)
    ids = torch.arange(8)[None]

    def push() -> None:
        state = {k: v for k, v in trainer.state_dict().items() if adapter_too or not k.startswith("lora")}
        sampler.load_state_dict(state, strict=adapter_too)

    def says(model: nn.Module) -> Tensor:
        y = model(ids)
        return (y + model.lora(y)).log_softmax(-1)  # type: ignore[operator]

    def kick() -> None:
        with torch.no_grad():
            trainer.lora.weight.add_(0.3 * torch.randn(23, 23, generator=torch.Generator().manual_seed(0)))

    if not adapter_too:
        sampler.load_state_dict(trainer.state_dict())  # they agree at the start; only later pushes lack the adapter
    return WeightSync(kick, push, lambda: says(trainer), lambda: says(sampler))


@defect("19", "the adapter's tensors are not among those that are pushed", "RT-SYNC", lambda: sync(True))
def _() -> WeightSync:
    return sync(False)


class LowRank(nn.Module):
    def __init__(self, zero_a: bool) -> None:
        super().__init__()
        self.base = Tiny().requires_grad_(False)
        self.a, self.b = nn.Linear(23, 3, bias=False), nn.Linear(3, 23, bias=False)
        nn.init.zeros_(self.b.weight)
        if zero_a:
            nn.init.zeros_(self.a.weight)

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        y = self.base(ids, attention, documents)
        return y + self.b(self.a(y))


def slot_step(zero_a: bool) -> Step:
    model = LowRank(zero_a)
    step = sft_step()
    trained = [p for p in model.parameters() if p.requires_grad]
    return Step(
        model=model, loss=sft_loss, batch=step.batch, roles=step.roles, optimizer=torch.optim.AdamW(trained, lr=1e-2)
    )


@defect("20", "a cleared adapter slot is reused with A = B = 0: no gradient, for ever", "GL", lambda: slot_step(False))
def _() -> Step:
    return slot_step(True)


class Checkpointed(nn.Module):
    """A frozen base and a checkpointed adapter: reentrant checkpointing trains it only where its input asks for a
    gradient, which ``enable_input_require_grads`` sees to."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.base = Tiny().requires_grad_(False)
        self.a, self.b = nn.Linear(23, 3, bias=False), nn.Linear(3, 23, bias=False)
        self.head = nn.Linear(23, 23)
        self.asks = asks

    def block(self, y: Tensor) -> Tensor:
        return y + self.b(self.a(y))

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        y = self.base(ids, attention, documents)
        if self.asks and torch.is_grad_enabled():
            y.requires_grad_(True)
        with warnings.catch_warnings():  # torch does warn of it, in a log that nobody read
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            y = checkpoint(self.block, y, use_reentrant=True)
        return self.head(y)


def checkpoint_step(asks: bool) -> Step:
    model = Checkpointed(asks)
    step = sft_step()
    trained = [p for p in model.parameters() if p.requires_grad]
    return Step(
        model=model, loss=sft_loss, batch=step.batch, roles=step.roles, optimizer=torch.optim.AdamW(trained, lr=1e-2)
    )


@defect(
    "21",
    "reentrant checkpointing without input gradients: checkpointed layers get none",
    "GL DF",
    lambda: checkpoint_step(True),
)
def _() -> Step:
    return checkpoint_step(False)


def layers(greedy: bool) -> Census:
    names = [f"model.layers.{i}.mlp.experts.{e}.up" for i in range(4) for e in range(3)]
    pattern = r".*\.(\d+)\..*" if greedy else r".*?\.(\d+)\..*"
    found = [n for n in names if int(re.match(pattern, n).group(1)) == 1]  # type: ignore[union-attr]
    return Census([n for n in names if n.startswith("model.layers.1.")], found)


@defect("22", "a greedy pattern reads the expert's index as the layer's", "CENSUS", lambda: layers(False))
def _() -> Census:
    return layers(True)


def dare(x: Tensor, density: float, kept: bool = True) -> Tensor:
    pruned = x * (torch.rand_like(x) < density)
    if kept:
        return torch.div(pruned, density)
    torch.div(pruned, density)  # the result is discarded
    return pruned


@defect("23", "DARE's rescaling is computed and thrown away", "UNBIASED KG", lambda: Unbiased(dare))
def _() -> Unbiased:
    return Unbiased(lambda x, d: dare(x, d, kept=False))


class Gated(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = Tiny().requires_grad_(False)
        self.gate = nn.Parameter(torch.ones(23, dtype=dtype))

    def forward(self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        return self.base(ids, attention, documents) * self.gate.float()


def gate_step(dtype: torch.dtype) -> Step:
    model = Gated(dtype)
    step = sft_step()
    optimizer = torch.optim.AdamW([model.gate], lr=1e-3)
    return Step(model=model, loss=sft_loss, batch=step.batch, roles=step.roles, optimizer=optimizer)


@defect(
    "24",
    "a bf16 gate at 1.0: the update rounds back and the parameter never moves",
    "GL F64",
    lambda: gate_step(torch.float32),
)
def _() -> Step:
    return gate_step(torch.bfloat16)


class Run:
    """Adam on a toy problem, with a data stream whose position is state."""

    def __init__(self) -> None:
        self.w = torch.zeros(5, requires_grad=True)
        self.optimizer = torch.optim.AdamW([self.w], lr=0.1)
        self.place = 0

    def go(self, steps: int) -> list[int]:
        seen = []
        for _ in range(steps):
            seen.append(self.place)
            x = torch.randn(5, generator=torch.Generator().manual_seed(self.place))
            F.mse_loss(self.w, x).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.place += 1
        return seen

    def save(self, folder: Path) -> None:
        state = self.optimizer.state_dict()["state"][0]
        save_file(
            {"w": self.w.detach(), "place": torch.tensor(self.place), **{f"adam.{k}": v for k, v in state.items()}},
            folder / "s",
        )

    def load(self, folder: Path, *, moments: bool = True, stream: bool = True) -> None:
        saved = load_file(folder / "s")
        with torch.no_grad():
            self.w.copy_(saved["w"])
        if stream:
            self.place = int(saved["place"])
        if moments:
            whole = self.optimizer.state_dict()
            whole["state"] = {0: {k.removeprefix("adam."): v for k, v in saved.items() if k.startswith("adam.")}}
            self.optimizer.load_state_dict(whole)


def resume(**forgets: bool) -> Resume:
    return Resume(
        Run, lambda r, n: r.go(n), lambda r, f: r.save(f), lambda r, f: r.load(f, **forgets), lambda r: r.w.detach()
    )


@defect("25a", "a resume starts with fresh optimizer moments", "RT-RESUME", resume)
def _() -> Resume:
    return resume(moments=False)


@defect("25b", "the data stream starts again after a resume", "RT-RESUME", resume)
def _() -> Resume:
    return resume(stream=False)


def rates(total: int, ranks: int, per_rank: bool = False) -> list[float]:
    """Linear decay, stepped once an update; or once a rank and update."""
    found, k = [], 0
    for _ in range(total):
        found.append(max(0.0, 1 - k / total))
        k += ranks if per_rank else 1
    return found


@defect(
    "26",
    "the scheduler is stepped num_processes times an update",
    "SCHEDULE",
    lambda: Schedule(rates, peak=1.0, final=0.0),
)
def _() -> Schedule:
    return Schedule(lambda t, r: rates(t, r, per_rank=True), peak=1.0, final=0.0)


def by_place(rewards: Tensor, groups: Tensor) -> Tensor:
    """Takes rows k·size … to be one prompt's, whatever ``groups`` says."""
    size = int((groups == groups[0]).sum())
    table = rewards.view(-1, size)
    return (table - table.mean(-1, keepdim=True)).flatten()


@defect("28", "prompts are tiled and grouped as if consecutive: advantages across prompts", "ADV RT SE",
        lambda: AdvantageEstimator(centred, "equal"))  # fmt: skip
def _() -> AdvantageEstimator:
    return AdvantageEstimator(by_place, "equal")


def gather(values: list[Tensor], aliased: bool) -> list[Tensor]:
    slots = [torch.zeros_like(values[0])] * len(values) if aliased else [torch.zeros_like(v) for v in values]
    for slot, value in zip(slots, values, strict=True):
        slot.copy_(value)
    return slots


@defect(
    "29",
    "all_gather into [t] * world_size: every rank's slot is one tensor",
    "RT-GATHER",
    lambda: Gather(lambda v: gather(v, False)),
)
def _() -> Gather:
    return Gather(lambda v: gather(v, True))


class Reflected(nn.Module):
    """W·H₀H₁…: Householder reflections whose paired birth makes every order the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Tiny().requires_grad_(False)
        half = torch.randn(2, 23, generator=torch.Generator().manual_seed(3))
        self.u = nn.Parameter(half.repeat_interleave(2, 0))

    def forward(
        self, ids: Tensor, attention: Tensor | None = None, documents: Tensor | None = None, reverse: bool = False
    ) -> Tensor:
        y = self.base(ids, attention, documents)
        for u in self.u.flip(0) if reverse else self.u:
            y = y - 2 * (y @ u)[..., None] * u / (u @ u)
        return y


def reflection_step(reverse: bool) -> Step:
    def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        logits = model(batch["ids"], batch["attention"], None, reverse)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)

    def written(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        dense = torch.eye(23)
        for u in model.u:  # type: ignore[union-attr]
            dense = dense @ (torch.eye(23) - 2 * torch.outer(u, u) / (u @ u))
        logits = (model.base(batch["ids"], batch["attention"]) @ dense)[:, :-1]  # type: ignore[operator]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)

    model = Reflected()
    step = sft_step()
    return Step(
        model=model,
        loss=loss,
        batch=step.batch,
        roles=step.roles,
        paths={"the dense formula": written},
        optimizer=torch.optim.AdamW([model.u], lr=1e-2),
    )


@defect(
    "30", "reflections are applied in reverse order; the paired birth hides it", "MU DF", lambda: reflection_step(False)
)
def _() -> Step:
    return reflection_step(True)
