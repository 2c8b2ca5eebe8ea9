"""Update: the optimizer receives the whole batch's gradient, clipped once, and nothing of the last update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from earnest_audit import Update, audit
from tests.audit.steps import sft_loss, sft_step

SCALE = 2.0**10


FAULTS = {
    "clip per micro-batch": "a clip that binds",  # lingua #59, transformers #1563
    "clip before unscale": "a clip that binds",  # pytorch/examples #1196
    "replicas counted twice": "a clip that binds",  # NeMo-RL #3788
    "never clipped": "a clip that binds",
    "mean of means": "no clip",
    "not unscaled": "no clip",
    "no zero_grad": "the next update",  # torchforge #71
    "a step a micro-batch": "no clip",
    "one is not reduced": "no clip",
}


def count(batch: Mapping[str, Any]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


def subject(fault: str | None, dtype: torch.dtype = torch.float32, clears_first: bool = False) -> Update:
    step, scale = sft_step(dtype=dtype), SCALE if fault is None or "scale" in fault else 1.0
    model, parameters = step.model, list(step.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)

    def unscale() -> None:
        for p in parameters:
            assert p.grad is not None
            p.grad.div_(scale * (2 if fault == "one is not reduced" and p is parameters[0] else 1))

    def clip(bound: float) -> None:
        if fault == "replicas counted twice":
            squares = [float(p.grad.double().square().sum()) for p in parameters if p.grad is not None]
            norm = math.sqrt(sum(squares) + sum(squares[:2]))
            for p in parameters:
                assert p.grad is not None
                p.grad.mul_(min(1.0, bound / norm))
        elif fault != "never clipped":
            nn.utils.clip_grad_norm_(parameters, bound)

    def update(batches: Sequence[Mapping[str, Any]], max_grad_norm: float) -> None:
        if clears_first:
            optimizer.zero_grad()
        counts = [count(b) for b in batches]
        for batch, n in zip(batches, counts, strict=True):
            share = 1 / len(batches) if fault == "mean of means" else n / sum(counts)
            (sft_loss(model, batch)[0] * share * scale).backward()
            if fault == "clip per micro-batch":
                nn.utils.clip_grad_norm_(parameters, max_grad_norm * scale)
            if fault == "a step a micro-batch":
                optimizer.step()
        if fault == "clip before unscale":
            clip(max_grad_norm)
        if fault != "not unscaled":
            unscale()
        if fault not in ("clip before unscale", "clip per micro-batch"):
            clip(max_grad_norm)
        if fault != "a step a micro-batch":
            optimizer.step()
        if fault != "no zero_grad" and not clears_first:
            optimizer.zero_grad()

    return Update(model, optimizer, update, lambda m, b: sft_loss(m, b)[0], step.batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("clears_first", [False, True])
def test_a_right_update_holds_and_is_restored(dtype: torch.dtype, clears_first: bool) -> None:
    right = subject(None, dtype, clears_first)
    before = [p.detach().clone() for p in right.model.parameters()]
    verdict = audit(right)
    assert verdict.holds, str(verdict)
    assert all(p.equal(b) and p.grad is None for p, b in zip(right.model.parameters(), before, strict=True))
    assert not right.optimizer.state and not right.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_update_is_seen_where_it_shows(fault: str, dtype: torch.dtype) -> None:
    failures = {f.subject for f in audit(subject(fault, dtype)).failures}
    assert any(FAULTS[fault] in s for s in failures), failures


@pytest.mark.parametrize("size", [1e-5, 1e-7])
def test_a_small_gradient_that_torch_clips_is_right(size: float) -> None:
    """torch's clip_grad_norm_ divides by norm + 1e-6, which shortens a small gradient; a clip that never happens is
    still seen."""
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(m: nn.Module, batch: Mapping[str, Any]) -> Any:
        return size * m(batch["x"]).square().sum()

    def update(batches: Sequence[Mapping[str, Any]], bound: float, clips: bool = True) -> None:
        for batch in batches:
            loss(model, batch).backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), bound)
        optimizer.step()
        optimizer.zero_grad()

    batch = {"x": torch.randn(8, 3, generator=torch.Generator().manual_seed(0))}
    assert audit(Update(model, optimizer, update, loss, batch)).holds
    never = Update(model, optimizer, lambda b, n: update(b, n, clips=False), loss, batch)
    assert {f.subject for f in audit(never).failures} == {"handed gradient, with a clip that binds"}


def test_a_model_without_trainable_parameters_is_a_finding() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    frozen = Update(model, optimizer, lambda *_: None, lambda m, b: m(b["x"]).sum(), {"x": torch.ones(4, 3)})
    assert [f.subject for f in audit(frozen).failures] == ["the whole batch's gradient"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", [None, "mean of means", "norms left out"])
def test_an_optimizer_may_own_fp32_copies(dtype: torch.dtype, fault: str | None) -> None:
    """Megatron, apex: gradients are added up in fp32, and the optimizer steps fp32 masters, in an order of its own.
    What is left in the model's own ``.grad`` is of no account."""
    step = sft_step(dtype=dtype)
    model, trained = step.model, list(step.model.parameters())
    masters = [p.detach().float().clone().requires_grad_(True) for p in trained]
    optimizer = torch.optim.SGD(masters[::-1], lr=0.1)

    def update(batches: Sequence[Mapping[str, Any]], max_grad_norm: float) -> None:
        total, main = sum(map(count, batches)), [torch.zeros_like(m) for m in masters]
        for batch in batches:
            model.zero_grad()
            share = 1 / len(batches) if fault == "mean of means" else count(batch) / total
            (sft_loss(model, batch)[0] * share).backward()
            for g, p in zip(main, trained, strict=True):
                g.add_(0 if p.grad is None else p.grad.float())
        for m, g in zip(masters, main, strict=True):
            m.grad = g
        nn.utils.clip_grad_norm_(masters[: 1 if fault == "norms left out" else None], max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for m, p in zip(masters, trained, strict=True):
                p.copy_(m)

    verdict = audit(Update(model, optimizer, update, lambda m, b: sft_loss(m, b)[0], step.batch))
    assert verdict.holds is (fault is None), str(verdict)
    others = torch.optim.SGD([torch.ones(3, requires_grad=True)], lr=0.1)
    foreign = audit(Update(model, others, update, lambda m, b: sft_loss(m, b)[0], step.batch))
    assert not foreign.failures and foreign.findings[-1].outcome == "not applicable"


def test_the_parameters_that_are_off_most_are_named() -> None:
    def first(fault: str) -> str:
        return audit(subject(fault)).failures[0].meaning.partition(". The optimizer")[0]

    names = [n for n, _ in subject(None).model.named_parameters()]
    assert first("one is not reduced") == f"Off most: {names[0]} (1 of {len(names)} parameters)"


@pytest.mark.parametrize("fault", [None, "mean of means", "no zero_grad"])
def test_an_update_that_never_clips_by_declaration(fault: str | None) -> None:
    clipped = subject(fault)

    def update(batches: Sequence[Mapping[str, Any]]) -> None:
        clipped.update(batches, math.inf)

    verdict = audit(Update(clipped.model, clipped.optimizer, update, clipped.loss, clipped.batch, clips=False))
    assert verdict.holds is (fault is None), str(verdict)
    assert not any("a clip that binds" in f.subject for f in verdict.findings)


@pytest.mark.parametrize("fault", [False, True])
def test_an_optimizer_per_parameter_that_steps_inside_the_backward(fault: bool) -> None:
    """LOMO's fused update: where one parameter's optimizer steps, the others have no gradient yet, or none any more."""
    step = sft_step()
    model, last = step.model, next(iter(step.model.parameters()))
    optimizer = torch.optim.AdamW([last], lr=1e-2)

    def update(batches: Sequence[Mapping[str, Any]]) -> None:
        def apply(p: nn.Parameter) -> None:
            if p is last:
                optimizer.step()
            p.grad = None

        hooks = [p.register_post_accumulate_grad_hook(apply) for p in model.parameters()]
        counts = [count(b) for b in batches]
        parts = [sft_loss(model, b)[0] * (n / sum(counts)) for b, n in zip(batches, counts, strict=True)]
        (parts[0] if fault else torch.stack(parts).sum()).backward()
        for hook in hooks:
            hook.remove()

    verdict = audit(Update(model, optimizer, update, sft_loss, step.batch, clips=False))
    assert verdict.holds is not fault, str(verdict)


class TwoParts(nn.Module):
    """A large body and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def squares(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def pairs() -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {"x": torch.randn(8, 4, generator=rng), "y": torch.randn(8, 2, generator=rng)}


@pytest.mark.parametrize("fault", ["", "only the last part", "not cleared"])
def test_a_part_in_a_flat_master_is_judged_by_the_models_own_gradient(fault: str) -> None:
    model = TwoParts()
    body = list(model.body.parameters())
    master = nn.Parameter(torch.cat([p.detach().flatten() for p in body]))
    optimizer = torch.optim.SGD([master, *model.head.parameters()], lr=0.1)

    def update(batches: Sequence[Mapping[str, Any]]) -> None:
        optimizer.zero_grad()
        if fault != "not cleared":
            model.zero_grad()
        rows = sum(len(b["x"]) for b in batches)
        for b in batches:
            if fault == "only the last part":
                model.body.zero_grad()
            (squares(model, b) * len(b["x"]) / rows).backward()
        master.grad = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in body])
        optimizer.step()

    verdict = audit(Update(model, optimizer, update, squares, pairs(), clips=False))
    where = {"": set(), "only the last part": {"handed gradient, no clip"}}
    assert {f.subject for f in verdict.failures} == where.get(fault, {"handed gradient, the next update"})


@pytest.mark.parametrize("clipped", ["head", "all"])
@pytest.mark.parametrize("fault", ["", "never clipped", "the rest is never cleared"])
def test_an_optimizer_of_a_part_may_clip_by_its_own_norm_or_by_that_of_all(clipped: str, fault: str) -> None:
    """What it does not own is not compared, and the first row counts what is. Where the rest is never cleared, the norm
    of all grows, and a clip by it shortens what is owned."""
    model = TwoParts()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)

    def update(batches: Sequence[Mapping[str, Any]], bound: float) -> None:
        optimizer.zero_grad()
        if fault != "the rest is never cleared":
            model.zero_grad()
        rows = sum(len(b["x"]) for b in batches)
        for b in batches:
            (squares(model, b) * len(b["x"]) / rows).backward()
        if fault != "never clipped":
            nn.utils.clip_grad_norm_((model if clipped == "all" else model.head).parameters(), bound)
        optimizer.step()

    verdict = audit(Update(model, optimizer, update, squares, pairs()))
    seen = {"never clipped": {"handed gradient, with a clip that binds"}}
    if clipped == "all":
        seen["the rest is never cleared"] = {"handed gradient, the next update"}
    assert {f.subject for f in verdict.failures} == seen.get(fault, set()), str(verdict)
    (first,) = (f for f in verdict.findings if f.subject == "handed gradient, no clip")
    assert "2 of 4 trainable parameters" in first.measured
