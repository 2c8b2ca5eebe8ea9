"""Accumulation: micro-batches leave the whole batch's gradient, in the call and in the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest_audit import (
    Accumulation,
    RoundTrip,
    SubjectError,
    Update,
    audit,
)
from tests.audit.steps import sft_loss, sft_step


def failed(subject: Any) -> set[str]:
    return {f.subject for f in audit(subject).failures}


def accumulation(dtype: torch.dtype, wrong: bool = False, auto: bool = False, **more: Any) -> Accumulation:
    step = sft_step(dtype=dtype)

    def accumulate(model: nn.Module, batches: Any) -> None:
        counts = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
        for batch, count in zip(batches, counts, strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=auto):
                loss = sft_loss(model, batch)[0]
            (loss * count / (counts[0] * len(counts) if wrong else sum(counts))).backward()

    return Accumulation(step.model, accumulate, step.batch, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_micro_batchs_count_for_all_is_seen_in_16_bits_too(dtype: torch.dtype) -> None:
    assert audit(accumulation(dtype)).holds
    assert failed(accumulation(dtype, wrong=True))
    assert not audit(accumulation(dtype, wrong=True, rows_interact=True)).failures, "declared: not judged"


def test_accumulation_knows_autocast() -> None:
    assert audit(accumulation(torch.float32, auto=True)).holds
    assert failed(accumulation(torch.float32, wrong=True, auto=True))


@pytest.mark.parametrize("only_the_last", [False, True])
def test_the_cut_avoids_parts_without_a_gradient(only_the_last: bool) -> None:
    """open-instruct #1498. The first row has no target: cut off alone, it would show nothing."""
    step = sft_step()
    step.batch["labels"][0] = -100

    def accumulate(model: nn.Module, batches: Any) -> None:
        counts = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
        for batch, count in zip(batches, counts, strict=True):
            if only_the_last:
                model.zero_grad()
            (sft_loss(model, batch)[0] * count / sum(counts)).backward()

    assert failed(Accumulation(step.model, accumulate, step.batch)) == (
        {"micro-batches of [2, 3] rows"} if only_the_last else set()
    )


@pytest.mark.parametrize("fault", ["", "0 / 0", "dropped"])
def test_a_part_without_a_gradient_leaves_the_others_alone(fault: str) -> None:
    model = nn.Linear(4, 3)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(4, 5, 4, generator=generator), torch.randint(0, 3, (4, 5), generator=generator)
    batch = {"x": x, "y": y, "mask": torch.ones(4, 5)}
    batch["mask"][0] = 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def mean(model: nn.Module, b: Any) -> torch.Tensor:
        each = nn.functional.cross_entropy(model(b["x"]).flatten(0, 1), b["y"].flatten(), reduction="none")
        count = b["mask"].sum()
        return (each * b["mask"].flatten()).sum() / (count if fault == "0 / 0" else count.clamp(min=1))

    def accumulate(model: nn.Module, batches: Any) -> None:
        total = sum(b["mask"].sum() for b in batches)
        for b in batches:
            if fault == "dropped" and not b["mask"].any():
                model.zero_grad()
                return
            (mean(model, b) * b["mask"].sum() / total).backward()

    def update(batches: Any, bound: float) -> None:
        optimizer.zero_grad()
        accumulate(model, batches)
        nn.utils.clip_grad_norm_(model.parameters(), bound)
        optimizer.step()

    assert failed(Accumulation(model, accumulate, batch)) == ({"micro-batches of [1, 3] rows"} if fault else set())
    assert failed(Update(model, optimizer, update, mean, batch)) == (
        {"handed gradient, parts of [1, 3] rows"} if fault else set()
    )
    assert not failed(Accumulation(model, accumulate, batch, split=[2, 2])), "the way out"


def test_the_number_of_cuts_is_bounded() -> None:
    """Only one row of many trains."""
    model, calls = nn.Linear(4, 1), []
    x, mask = torch.randn(256, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(256)
    mask[200] = 1

    def accumulate(model: nn.Module, batches: Any) -> None:
        calls.append(len(batches))
        for b in batches:
            (model(b["x"])[:, 0] * b["mask"]).sum().backward()

    assert audit(Accumulation(model, accumulate, {"x": x, "mask": mask})).holds
    assert len(calls) < 30


def test_texts_are_cut_with_their_rows() -> None:
    right = accumulation(torch.float32)
    inner, right.batch = right.accumulate, {**right.batch, "texts": [str(i) for i in range(5)], "name": "a batch"}

    def accumulate(model: nn.Module, batches: Any) -> None:
        assert all(len(b["texts"]) == len(b["ids"]) and b["name"] == "a batch" for b in batches)
        inner(model, batches)

    right.accumulate = accumulate
    assert audit(right).holds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_accumulation_in_its_own_resolution(dtype: torch.dtype) -> None:
    step = sft_step(dtype=dtype)

    def accumulate(model: nn.Module, batches: Any, off: float = 0.0) -> None:
        counts = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
        for i, (batch, count) in enumerate(zip(batches, counts, strict=True)):
            (sft_loss(model, batch)[0] * count / sum(counts) * (1 + off * i)).backward()

    before = {n: p.detach().clone() for n, p in step.model.named_parameters()}
    assert audit(Accumulation(step.model, accumulate, step.batch)).holds
    wrong = audit(Accumulation(step.model, lambda m, b: accumulate(m, b, 1e-3), step.batch))
    assert wrong.holds == (dtype == torch.bfloat16), "1e-3 is a fault in fp32 and rounding in bf16"
    assert all(p.equal(before[n]) for n, p in step.model.named_parameters())


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
def test_accumulation_leaves_nothing_over(keeps: str, dtype: torch.dtype) -> None:
    step = sft_step(dtype=dtype)
    seen = failed(Accumulation(step.model, Accumulate(keeps), step.batch))
    assert ("the same batch again" in seen) == bool(keeps), seen
    again = failed(Accumulation(step.model, Accumulate(keeps), step.batch, stateful=True))
    assert "the same batch again" not in again and bool(keeps) >= bool(again)


@pytest.mark.parametrize("keeps", ["a running scale", "its own noise"])
def test_noise_and_running_statistics_are_legitimate(keeps: str) -> None:
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


@pytest.mark.parametrize("wrong", [False, True])
def test_a_term_that_is_multiplied_by_the_number_of_ranks_is_seen(wrong: bool) -> None:
    """transformers #48690: a router's loss is local by design, and still counts once."""
    step = sft_step()

    def accumulate(model: nn.Module, ranks: Any) -> None:
        counts = [int((b["labels"][:, 1:] != -100).sum()) for b in ranks]
        for batch, count in zip(ranks, counts, strict=True):
            local = next(model.parameters()).square().sum()
            (sft_loss(model, batch)[0] * count / sum(counts) + local * (1 if wrong else 1 / len(ranks))).backward()

    found = failed(Accumulation(step.model, accumulate, step.batch, what="ranks", rows_interact=True))
    assert found == ({"the batch twice, as ranks"} if wrong else set())


def test_without_a_gradient_the_verdict_says_so() -> None:
    """No backward pass, and no trainable parameter: one row with the reason, and no error."""
    batch = {"x": torch.randn(4, 3)}
    none = audit(Accumulation(nn.Linear(3, 1), lambda model, batches: None, batch))
    assert [(f.subject, f.measured) for f in none.failures] == [("the whole batch's gradient", "norm 0")]
    assert "backward" in none.failures[0].meaning
    frozen = Accumulation(nn.Linear(3, 1).requires_grad_(False), summed, batch)
    assert [f.measured for f in audit(frozen).failures] == ["no parameter is trainable"]


def summed(model: nn.Module, batches: Any, mean: bool = False) -> None:
    for batch in batches:
        rows = torch.stack([model(torch.as_tensor(x)).sum() for x in batch["x"]])
        (rows.mean() if mean else rows.sum()).backward()


def test_rows_may_be_lists() -> None:
    batch = {"x": torch.randn(5, 3).tolist(), "name": "a text"}
    assert audit(Accumulation(nn.Linear(3, 1), summed, batch)).holds
    assert failed(Accumulation(nn.Linear(3, 1), lambda m, b: summed(m, b, mean=True), batch))


@pytest.mark.parametrize(("more", "why"), [({"split": (1, 2)}, "its sum has to be 5"), ({"batch": {}}, "no rows")])
def test_a_batch_is_cut_where_it_can_be(more: dict[str, Any], why: str) -> None:
    subject = Accumulation(
        **{"model": nn.Linear(3, 1), "accumulate": summed, "batch": {"x": torch.randn(5, 3)}, **more}
    )
    if not subject.batch:
        subject.accumulate = lambda model, batches: model(torch.ones(3)).sum().backward()
    with pytest.raises(SubjectError, match=why):
        audit(subject)
