"""Collator, Ranks, AdapterStart: right ones hold, and each fault is a failure of the row that is about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
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


@pytest.mark.parametrize(("seed", "seen"), [
    (lambda rank, step: 4 * step + rank, set()), (lambda rank, step=0: step + rank, set()),
    (lambda rank, step: step + rank, {"different ranks"}),
])  # fmt: skip
def test_ranks_draw_differently_in_every_step(seed: Any, seen: set[str]) -> None:
    """seed + step + rank: a rank draws what the next one drew a step before."""

    @wraps(seed)
    def draw(*place: int) -> Tensor:
        return torch.randint(0, 40, (8,), generator=torch.Generator().manual_seed(seed(*place)))

    verdict = audit(Ranks(draw=draw))
    assert {f.subject for f in verdict.failures} == seen
    assert all("rank 0 in step 1 and rank 1 in step 0" in f.meaning for f in verdict.failures)


def test_a_row_has_the_place_of_what_is_declared() -> None:
    (row,) = audit(collator("truncates")).failures
    line = collator.__code__.co_firstlineno + 1
    assert row.place.endswith(f"test_data_and_ranks.py:{line}"), "the function, and not the line that audits it"


def test_the_cut_that_disagrees_is_named() -> None:
    def padded(parts: list[Tensor]) -> float:
        return float(torch.cat(parts).sum()) + (len(parts) == 2)

    rows = torch.randn(11, generator=torch.Generator().manual_seed(0)) ** 2
    found = audit(Ranks(metric=padded, rows=rows, single=lambda parts: float(torch.cat(parts).sum()))).failures
    assert "rows cut 2+9:" in found[0].measured and "(2+3+6)" in found[1].measured


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
        if fault == "PiSSA":
            nn.init.normal_(self.b)
            base.weight.data -= (self.b @ self.a).detach()
            self.start = (self.b @ self.a).detach()

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if self.fault == "PiSSA" and not self.on:
            return y + x @ self.start.T
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


@pytest.mark.parametrize("seed", range(3))
def test_a_base_that_the_adapter_makes_up_for_is_a_warning(seed: int) -> None:
    """PiSSA takes the adapter's start out of the base; a weight that is rounded without an effect is still seen."""
    torch.manual_seed(seed)
    base, x = nn.Linear(4, 3), torch.randn(5, 4)
    verdict = audit(AdapterStart(base, lambda m: Lora(m, "PiSSA"), lambda m: m(x), off))  # type: ignore[arg-type]
    assert verdict.holds and [f.subject for f in verdict.warnings] == ["base weights"], str(verdict)
    base, x[:, 0] = nn.Linear(4, 3), 0.0

    def rounds_what_nothing_reads(m: nn.Linear) -> Lora:
        m.weight.data[:, 0] = m.weight.data[:, 0].bfloat16().float()
        return Lora(m, "")  # type: ignore[arg-type]

    assert failed(AdapterStart(base, rounds_what_nothing_reads, lambda m: m(x), off)) == {"base weights"}  # type: ignore[arg-type]


def test_a_metric_over_ranks_is_what_one_process_computes() -> None:
    rows = torch.randn(11, 3, generator=torch.Generator().manual_seed(0)) ** 2

    def total(parts: list[Tensor]) -> float:
        return float(sum(p.sum() for p in parts))

    assert audit(Ranks(metric=total, rows=rows, single=lambda parts: float(torch.cat(parts).sum()))).holds
    twice = Ranks(metric=lambda parts: 2 * total(parts), rows=rows, single=lambda parts: float(torch.cat(parts).sum()))
    assert failed(twice) == {"the metric in one process"}
    largest = Ranks(
        metric=lambda parts: max(float(p.mean()) for p in parts), rows=rows, by_rank=True,
        single=lambda parts: max(float(p.sum()) / p.numel() for p in parts),
    )  # fmt: skip
    assert audit(largest).holds, "it depends on the cut by its definition"


def packs(examples: list[Any], fault: str = "") -> dict[str, Tensor]:
    ids = [e["ids"] for e in examples]
    if fault == "requeues":
        ids = [part for i in ids for part in (i[:4], i[4:]) if part]
    else:
        ids = [i[:4] for i in ids]
    documents = [0 if fault == "one document" else k for k, i in enumerate(ids) for _ in i]
    flat = [t for i in ids for t in i]
    places = [p for i in ids for p in range(len(i))]
    if fault == "positions":
        places = list(range(len(flat)))
    return {"ids": torch.tensor(flat), "positions": torch.tensor(places), "documents": torch.tensor(documents)}


def unpack(batch: Any) -> list[dict[str, Tensor]]:
    each = [batch["documents"] == d for d in batch["documents"].unique()]
    return [{k: batch[k][on] for k in ("ids", "positions")} for on in each]


@pytest.mark.parametrize("fault", ["", "requeues", "one document", "positions"])
def test_a_packed_example_is_the_document_that_it_is_alone(fault: str) -> None:
    """TRL #5075, torchtitan #3130, LLaMA-Factory #10283."""
    stage = Collator(lambda e: packs(e, fault), EXAMPLES, rows=False, unpack=unpack)
    assert failed(stage) == ({"documents"} if fault else set())


@pytest.mark.parametrize("prompt", [1, 2])
def test_exactly_the_declared_targets_are_supervised(prompt: int) -> None:
    """torchtitan #2755: the first token of the answer is masked too."""

    def stage(examples: list[Any]) -> dict[str, Tensor]:
        batch = collate(examples)
        batch["labels"] = torch.where(
            (batch["ids"] == 0) | (torch.arange(batch["ids"].shape[1]) < prompt), -100, batch["ids"]
        )
        return batch

    declared = Collator(stage, EXAMPLES, {"ids": 0, "labels": -100}, targets=lambda e: e["ids"][1:])
    assert failed(declared) == (set() if prompt == 1 else {"supervised tokens"})


@pytest.mark.parametrize("lost", [False, True])
def test_a_column_has_what_is_declared_of_each_example(lost: bool) -> None:
    """OpenRLHF #1327: the flag of a truncated answer is dropped in every example alike."""
    examples = [{"ids": [5, 6, 7], "cut": True}, {"ids": [8, 9], "cut": False}]

    def stage(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        ids = torch.tensor([(r["ids"] + [0, 0])[:4] for r in rows])
        return {"ids": ids, "truncated": torch.tensor([float(r["cut"] and not lost) for r in rows])}

    columns = {"truncated": lambda e: float(e["cut"]), "ids": lambda e: e["ids"]}
    found = {f.subject for f in audit(Collator(stage, examples, {"ids": 0}, columns=columns)).failures}
    assert found == ({"column truncated"} if lost else set())


def rows_of(examples: list[Any], shift: int = 0) -> dict[str, Tensor]:
    return {"y": torch.tensor([[e, e] for e in examples]).roll(shift, 0)}


@pytest.mark.parametrize("shift", [0, 1])
def test_declarations_are_about_the_batch(shift: int) -> None:
    """A batch that is rolled is right for one example alone."""

    def rows(**more: Any) -> dict[str, str]:
        stage = Collator(lambda e: rows_of(e, shift), [1, 2, 3], columns={"y": lambda e: [e, e]}, labels="y",
                         targets=lambda e: [e, e], **more)  # fmt: skip
        return {f.subject: f.outcome for f in audit(stage).findings}

    outcome = "fails" if shift else "holds"
    assert {rows()[k] for k in ("column y", "supervised tokens")} == {outcome}
    unknown = rows(rows=False)
    assert {unknown[k] for k in ("column y", "supervised tokens")} == {"not declared"}
    unpacked = rows(rows=False, unpack=lambda b: [{"y": y} for y in b["y"]])
    assert unpacked["documents"] == "holds" and unpacked["column y"] == "holds", "the same documents in another order"


def test_supervised_tokens_that_differ_are_named() -> None:
    wrong = Collator(rows_of, [1, 2], labels="y", targets=lambda e: [e, 9])
    (row,) = audit(wrong).failures
    assert "example 0 lacks 9 and also has 1" in row.meaning


@pytest.mark.parametrize(("kept", "holds"), [(7, True), (4, False), (1, False)])
def test_a_row_per_example_is_a_claim(kept: int, holds: bool) -> None:
    def stage(examples: list[Any]) -> dict[str, Tensor]:
        return rows_of(examples[:kept])

    found = audit(Collator(stage, list(range(7))))
    assert found.holds == holds and audit(Collator(stage, list(range(7)), rows=False)).holds
    assert holds or [f.measured for f in found.failures] == [f"7 examples, {kept} rows"]


@pytest.mark.parametrize(("off", "holds"), [(2.0**-23, True), (1e-3, False)])
def test_floats_alone_and_in_a_batch_are_equal_up_to_rounding(off: float, holds: bool) -> None:
    examples = [torch.tensor([-3.0, -1e9, 0.0, 0.1]), torch.tensor([-30.0, -2.0, -0.3, 0.5])]

    def stage(rows: list[Tensor]) -> dict[str, Tensor]:
        logprobs = torch.stack(rows) * (1 + off * (len(rows) > 1))
        return {"logprobs": logprobs, "reward": torch.tensor([float("nan") if r[0] < -9 else 1.0 for r in rows])}

    found = audit(Collator(stage, examples, columns={"logprobs": lambda e: e}))
    assert found.holds == holds
    assert any("floats by" in f.measured for f in found.findings), "the difference is printed"


@pytest.mark.parametrize("fault", ["", "one column is not filtered", "another order", "keeps all"])
def test_a_filter_declares_what_it_keeps(fault: str) -> None:
    examples = [{"id": n, "rewards": r} for n, r in enumerate([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.5]])]

    def keeps(example: dict[str, Any]) -> bool:
        return len(set(example["rewards"])) > 1

    def stage(groups: list[dict[str, Any]]) -> dict[str, Tensor]:
        kept = groups if fault == "keeps all" else [g for g in groups if keeps(g)]
        rewards = [g["rewards"] for g in (groups if fault == "one column is not filtered" else kept)][: len(kept)]
        ids = sorted(g["id"] for g in kept) if fault == "another order" else [g["id"] for g in kept]
        return {"id": torch.tensor(ids), "rewards": torch.tensor(rewards)}

    seen = failed(Collator(stage, examples, keeps=keeps, columns={"rewards": lambda e: e["rewards"]}))
    assert seen == {
        "": set(), "one column is not filtered": {"column rewards", "permuted examples", "each example alone"},
        "another order": {"permuted examples"}, "keeps all": {"rows"},
    }[fault]  # fmt: skip


class Cached:
    """Log-probs of pairs, kept by the prompt alone or by the whole pair."""

    def __init__(self, whole: bool) -> None:
        self.whole, self.kept = whole, dict[Any, float]()

    def __call__(self, examples: list[tuple[str, int]]) -> dict[str, Tensor]:
        return {"lp": torch.tensor([self.kept.setdefault(e if self.whole else e[0], float(e[1])) for e in examples])}


@pytest.mark.parametrize("whole", [True, False])
def test_a_stage_with_a_memory_begins_anew(whole: bool) -> None:
    seen = failed(Collator(Cached(whole), [("p", 1), ("q", 2), ("p", 3)]))
    assert seen == (set() if whole else {"permuted examples", "each example alone"})


@pytest.mark.parametrize("lost", [False, True])
def test_a_declared_column_may_begin_with_what_pads(lost: bool) -> None:
    """The labels of a prompt are -100, which pads too; one example has no token."""
    rows = [[-100, -100, 5, 6], [-100, 7], []]

    def fn(examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        own = [e["labels"][: -1 if lost else None] for e in examples]
        width = max(4, *map(len, own))
        return {"labels": torch.tensor([row + [-100] * (width - len(row)) for row in own])}

    collator = Collator(
        fn, [{"labels": row} for row in rows], pads={"labels": -100}, columns={"labels": lambda e: e["labels"]}
    )
    found = {f.subject: f.outcome for f in audit(collator).findings}
    assert found["column labels"] == ("fails" if lost else "holds")
