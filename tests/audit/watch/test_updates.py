"""The watch on updates: ownership, cleared gradients, the logged norm, the learning rate."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from earnest_audit import Verdict, WatchWarning, watch
from tests.audit.steps import Tiny, sft_loss, sft_step

BATCH = sft_step().batch


def run(
    model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, updates: int = 26, *,
    before: Callable[[int, nn.Module, torch.optim.Optimizer], Any] = lambda *_: None, clears: str = "after",
    norm: Callable[[nn.Module], float] | None = None, dtype: torch.dtype = torch.float32, schedule: Any = None,
) -> Verdict:  # fmt: skip
    """A bare loop that is looked at in every update; each batch is another, so that nothing stays constant by
    chance."""
    model = (model or Tiny(0)).to(dtype)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) if schedule else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WatchWarning)
        with watch(model, optimizer, every=1) as w:
            for number in range(updates):
                before(number, model, optimizer)
                if clears == "before":
                    optimizer.zero_grad()
                loss = sft_loss(model, BATCH)[0] * (1 + 0.1 * math.sin(number))
                loss.backward()
                w.step(loss, {"grad_norm": norm(model)} if norm else None)
                optimizer.step()
                if clears in ("after", "in place"):
                    optimizer.zero_grad(set_to_none=clears == "after")
                if plan is not None:
                    plan.step()
        assert all(not p._backward_hooks for p in model.parameters()), "no hook is left over"
    return w.verdict()


def failed(verdict: Verdict) -> set[str]:
    return {f.subject for f in verdict.failures}


def test_an_optimizer_of_a_copy_is_seen() -> None:
    model = Tiny(0)
    assert failed(run(model, torch.optim.AdamW(copy.deepcopy(model).parameters(), lr=1e-3), 6)) == {
        "the optimizer's parameters"
    }
    assert run(model, torch.optim.AdamW(model.parameters(), lr=1e-3), 6).holds


@pytest.mark.parametrize("given", [True, False])
def test_what_is_unfrozen_later_has_to_be_given_to_the_optimizer(given: bool) -> None:
    """Lightning #5744."""
    model = Tiny(0).requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-3)

    def unfreeze(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if number == 3:
            model.requires_grad_(True)
            if given:
                rest = [p for n, p in model.named_parameters() if not n.startswith("head")]
                optimizer.add_param_group({"params": rest})

    assert failed(run(model, optimizer, before=unfreeze)) == (set() if given else {"the optimizer's parameters"})


@pytest.mark.parametrize("part", ["all but one layer", "all", "replaced"])
def test_what_the_optimizer_leaves_out_is_missing(part: str) -> None:
    """Four looks are enough, although the optimizer owns a part of the model."""
    model = Tiny(0)
    given = [p for n, p in model.named_parameters() if part != "all but one layer" or not n.startswith("out.")]
    optimizer = torch.optim.AdamW(given, lr=1e-3)
    if part == "replaced":
        model.out = copy.deepcopy(model.out)
    verdict = run(model, optimizer, 6)
    assert failed(verdict) == (set() if part == "all" else {"the optimizer's parameters"}), str(verdict)
    (row,) = [f for f in verdict.findings if f.subject == "the optimizer's parameters"]
    assert part == "all" or (row.measured.startswith("2 with") and "out.weight, out.bias" in row.meaning)


@pytest.mark.parametrize("kind", ["steps rarely", "owns copies with more digits"])
def test_what_another_optimizer_of_the_process_may_own_is_given_time(kind: str) -> None:
    model = Tiny(0)
    dtype = torch.float32 if kind == "steps rarely" else torch.bfloat16
    theirs = [p for n, p in model.to(dtype).named_parameters() if n.startswith("out.")]
    mine = [p for n, p in model.named_parameters() if not n.startswith("out.")]
    other = torch.optim.SGD([p if dtype == torch.float32 else p.detach().float() for p in theirs], lr=0.1)
    verdict = run(model, torch.optim.SGD(mine, lr=0.1), 6, dtype=dtype)
    (row,) = [f for f in verdict.findings if f.subject == "the optimizer's parameters"]
    assert verdict.holds and row.outcome == "not applicable" and other, str(verdict)
    assert failed(run(model, torch.optim.SGD(mine, lr=0.1), 24, dtype=dtype)) == {"the optimizer's parameters"}


def test_what_another_optimizer_moves_is_no_stray() -> None:
    model = Tiny(0)
    mine, theirs = ([p for n, p in model.named_parameters() if n.startswith("out") == out] for out in (True, False))
    other = torch.optim.AdamW(theirs, lr=1e-3)

    def also(number: int, model: nn.Module, _: torch.optim.Optimizer) -> None:
        other.step()
        other.zero_grad()

    verdict = run(model, torch.optim.AdamW(mine, lr=1e-3), before=also)
    assert verdict.holds, str(verdict)


def test_several_optimizers_are_given_as_a_list() -> None:
    model = Tiny(0)
    parts = [[p for p in model.parameters() if (p.ndim == 2) == two] for two in (True, False)]
    each = [torch.optim.AdamW(ps, lr=1e-3) for ps in parts]
    with watch(model, each, every=1) as w:
        for _ in range(6):
            sft_loss(model, BATCH)[0].backward()
            w.step()
            for optimizer in each:
                optimizer.step()
                optimizer.zero_grad()
    assert w.verdict().holds and w.updates == 6


def test_what_is_frozen_on_purpose_is_not_dead() -> None:
    def freeze(number: int, model: nn.Module, _: torch.optim.Optimizer) -> None:
        if number == 3:
            model.embed.requires_grad_(False)  # type: ignore[union-attr, operator]
            model.embed.weight.grad = None  # type: ignore[union-attr]

    verdict = run(before=freeze)
    assert verdict.holds, str(verdict)


@pytest.mark.parametrize("clears", ["after", "before", "in place", "never"])
def test_gradients_are_cleared_between_two_updates(clears: str) -> None:
    """torchforge #71."""
    assert failed(run(clears=clears, updates=8)) == ({"gradients between two updates"} if clears == "never" else set())


def test_optimizers_that_take_turns_clear_at_the_start_of_their_turns() -> None:
    """The other's backward runs through this one's parameters first, and finds its old gradient."""

    def other(number: int, model: nn.Module, _: torch.optim.Optimizer) -> None:
        sft_loss(model, BATCH)[0].backward()

    assert run(clears="before", before=other, updates=8).holds


def local(model: nn.Module) -> float:
    """torchtitan #766: one shard's norm, and everything clipped by it."""
    parameters = list(model.parameters())
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in parameters[:2] if p.grad is not None))
    for p in parameters:
        assert p.grad is not None
        p.grad.mul_(min(1.0, 1.0 / norm))
    return norm


def after_clip(model: nn.Module) -> float:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return round(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)), 4)


def test_a_norm_of_a_part_is_seen() -> None:
    assert failed(run(norm=local)) == {"grad_norm"}
    factors = iter([1e3] + [1.0] * 99)
    often = run(norm=lambda m: next(factors) * local(m))
    assert [f.subject for f in often.warnings] == ["grad_norm"], "short in all looks but one: it may be a mean"
    assert run(norm=lambda m: float(nn.utils.clip_grad_norm_(m.parameters(), 0.1))).holds
    assert run(norm=after_clip).holds, "the norm after a clip is constant, legitimately"


def test_a_learning_rate_that_stays_at_0_is_seen() -> None:
    assert failed(run(schedule=lambda k: 0.0)) == {"the learning rate"}
    assert run(schedule=lambda k: min(1.0, k / 10)).holds
    assert run(schedule=lambda k: max(0.0, 1 - k / 3)).holds, "a schedule may end before the run does"


@pytest.mark.parametrize("shape", [lambda k: 1e-4 * k / 26, lambda k: max(0.0, 1 - k / 4)], ids=["warm-up", "decay"])
def test_at_the_foot_of_a_schedule_16_bits_may_lose_an_update(shape: Callable[[int], float]) -> None:
    verdict = run(dtype=torch.bfloat16, schedule=shape)
    assert "the parameters' bits" not in failed(verdict), str(verdict)


def test_pre_training_supervises_everything_by_declaration() -> None:
    on, model = torch.ones(2, 3), Tiny(0)
    for declared in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WatchWarning)
            with watch(model, every=1, all_supervised=declared) as w:
                for _ in range(6):
                    model(on.long()).sum().backward()
                    w.step(mask=on, attention=on)
        assert ("supervised share" in failed(w.verdict())) == (not declared)


class Words(nn.Module):
    """A large table of which a batch reads a few rows, with a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9000, 8, sparse=True), nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids)).square().mean()


@pytest.mark.parametrize("fault", ["", "constant", "forgotten"])
def test_a_sparse_gradient_is_watched(fault: str) -> None:
    torch.manual_seed(0)
    model = Words()
    each = [torch.optim.SGD(model.head.parameters(), lr=0.1)]
    if fault != "forgotten":
        each.append(torch.optim.SGD(model.table.parameters(), lr=1e-30 if fault == "constant" else 0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WatchWarning)
        with watch(model, each, every=1) as w:
            for number in range(6):
                loss = model(torch.tensor([[5, 5, 7], [11, 2, 5]]) + number)
                w.terms({"all": loss})
                loss.backward()
                w.step(loss, {"grad_norm": 10.0})
                for optimizer in each:
                    optimizer.step()
                model.zero_grad()
    subject = {"": set(), "constant": {"the parameters' bits"}, "forgotten": {"the optimizer's parameters"}}
    assert failed(w.verdict()) == subject[fault], str(w.verdict())


@pytest.mark.parametrize(
    ("schedule", "outcome"),
    [(lambda k: 0.0, "warns"), (lambda k: k / 10, None), (lambda k: float(k < 5), None)],
    ids=["always 0", "warm-up", "ended"],
)
def test_a_learning_rate_of_0_is_reported_early(schedule: Any, outcome: str | None) -> None:
    """After four looks it warns, after twenty it fails; meanwhile the row of the parameters' bits gives the reason."""
    verdict = run(updates=8, schedule=schedule)
    rows = {f.subject: f for f in verdict.findings}
    assert verdict.holds and (rows["the learning rate"].outcome if "the learning rate" in rows else None) == outcome
    bits = rows["the parameters' bits"]
    assert (bits.outcome, bits.measured) == ("not applicable", "every learning rate is 0") or outcome is None
    assert {f.subject: f for f in run(updates=2).findings}["the parameters' bits"].outcome == "not applicable"
