"""Collator, Ranks, AdapterStart: right ones hold, and each fault is a failure of the row that is about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest_audit import AdapterStart, Collator, Ranks, audit

EXAMPLES = [{"ids": [5, 6, 7], "weight": 0.5}, {"ids": [8, 9], "weight": 2.0}, {"ids": [3, 4, 5, 6, 7], "weight": 1.0}]


def failed(subject: Any) -> set[str]:
    return {f.subject for f in audit(subject).failures}


def collate(examples: list[Any], fault: str = "") -> dict[str, Tensor]:
    if fault == "writes":
        for e in examples:
            e["ids"].append(2)
    rows = [torch.tensor(e["ids"]) for e in examples]
    if fault == "truncates":
        rows = [r[: min(map(len, rows))] for r in rows]
    if fault == "sorts one column":
        rows = sorted(rows, key=len)
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = ids.roll(1, 0) if fault == "the neighbour's labels" else ids.clone()
    weight = torch.tensor([e["weight"] for e in examples])
    return {"ids": ids, "labels": labels, "weight": weight / weight.sum() if fault == "normalises" else weight}


def collator(fault: str = "", **more: Any) -> Collator:
    return Collator(lambda e: collate(e, fault), EXAMPLES, {"ids": 0, "labels": 0}, **more)


@pytest.mark.parametrize(("fault", "seen"), [
    ("", set()), ("writes", {"the examples afterwards"}), ("truncates", {"each example alone"}),
    ("normalises", {"each example alone"}), ("sorts one column", {"permuted examples", "each example alone"}),
    ("the neighbour's labels", {"permuted examples", "each example alone"}),
])  # fmt: skip
def test_a_collator_keeps_each_example_to_its_row(fault: str, seen: set[str]) -> None:
    assert failed(collator(fault)) == seen


def test_a_packing_stage_declares_that_rows_are_not_examples() -> None:
    packed = Collator(lambda e: {"ids": torch.tensor([i for x in e for i in x["ids"]])[None]}, EXAMPLES, rows=False)
    assert audit(packed).holds


@pytest.mark.parametrize(("draw", "seen"), [
    (lambda r: torch.randn(5, generator=torch.Generator().manual_seed(r)), set()),
    (lambda _: torch.randn(5, generator=torch.Generator().manual_seed(0)), {"different ranks"}),
    (lambda _: torch.randn(5), {"the same rank again"}),
])  # fmt: skip
def test_ranks_draw_differently_and_repeatably(draw: Any, seen: set[str]) -> None:
    assert failed(Ranks(draw=draw)) == seen


def test_a_metric_over_ranks_does_not_depend_on_the_cut() -> None:
    rows = torch.randn(11, 3, generator=torch.Generator().manual_seed(0)) ** 2
    right = Ranks(metric=lambda parts: float(sum(p.sum() for p in parts) / sum(p.numel() for p in parts)), rows=rows)
    assert audit(right).holds
    means = Ranks(metric=lambda parts: float(torch.stack([p.mean() for p in parts]).mean()), rows=rows)
    assert failed(means) == {"a metric over ranks"}


class Lora(nn.Module):
    def __init__(self, base: nn.Linear, fault: str) -> None:
        super().__init__()
        self.base, self.on, self.fault = base, True, fault
        base.requires_grad_(fault == "base is trained")
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(3, 2))
        if fault == "not exact":
            nn.init.normal_(self.b)
        if fault == "rounds the base":
            base.weight.data = base.weight.data.bfloat16().float()

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        on = self.on or self.fault == "disable does nothing"
        return y + x @ self.a.T @ self.b.T if on and self.fault != "not applied" else y


@contextmanager
def off(model: Any) -> Iterator[None]:
    model.on = False
    yield
    model.on = True


@pytest.mark.parametrize(("fault", "seen"), [
    ("", set()), ("not exact", {"at initialization"}), ("not applied", {"perturbed"}),
    ("disable does nothing", {"disabled"}), ("base is trained", {"what is trainable"}),
    ("rounds the base", {"at initialization", "disabled", "base weights"}),
])  # fmt: skip
def test_an_adapter_at_initialization(fault: str, seen: set[str]) -> None:
    torch.manual_seed(0)
    base, x = nn.Linear(4, 3), torch.randn(5, 4)
    start = AdapterStart(base, lambda m: Lora(m, fault), lambda m: m(x), off)  # type: ignore[arg-type]
    assert failed(start) == seen
