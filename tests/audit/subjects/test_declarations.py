"""What cannot be audited is refused in one sentence, when a subject is made or when its function is called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from earnest_audit import (
    GAE,
    AdapterStart,
    AdvantageEstimator,
    Census,
    ChatTemplate,
    Collator,
    FirstCall,
    Gather,
    Grader,
    MergedLayer,
    Ranks,
    RoundTrip,
    Schedule,
    SubjectError,
    Unbiased,
    audit,
)  # fmt: skip
from earnest_audit.subjects.base import equal

TALK = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
ROWS = [{"ids": [1, 2]}, {"ids": [3]}]


def advantages(rewards: Any, groups: Any) -> Any:
    return rewards - rewards.mean()


def collate(examples: list[Any]) -> dict[str, Any]:
    rows = [torch.tensor(e["ids"]) for e in examples]
    return {"ids": nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=9)}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: AdvantageEstimator(advantages, "fre"), "Literal.'free', 'equal'. is needed: did you mean 'free'"),
        (lambda: AdvantageEstimator(advantages, "free", over="groups"), "did you mean 'group'"),
        (lambda: AdvantageEstimator(lambda rewards: rewards, "free"), "called with 2 arguments and takes .rewards."),
        (lambda: Grader(len, "4", ["5"]), r"right='4'.*Sequence\[str\] is needed: give \['4'\]"),
        (lambda: Grader(len, ["4"], []), r"wrong=\[\]\): it is empty: give at least one"),
        (lambda: Grader(3, ["4"], ["5"]), "grade=3.*Callable.*is needed"),
        (lambda: Unbiased(lambda x, p: x, draws=2.5), "draws=2.5.*int is needed"),
        (lambda: Gather(lambda values: values, ragged="yes"), "ragged='yes'.*bool is needed"),
        (Ranks, r"give draw=…, or metric=… with rows=…"),
        (lambda: Ranks(metric=len, rows=[1, 2, 3]), "Tensor . None is needed"),
        (lambda: Census([1, 2], [1]), "Iterable.str. . Mapping.str, float. is needed"),
        (lambda: Schedule(lambda total: [1.0] * total, 1.0, 1.0), "called with 2 arguments and takes .total."),
        (lambda: Schedule(lambda total, ranks: 1e-3, 1.0, 1.0), "rates.: it returned 0.001, and Sequence"),
        (lambda: Grader(lambda a: None, ["4"], ["5"]), "it returned None, and float is needed"),
        (lambda: GAE(lambda r, v, m, gamma, lam: None), "it returned None"),
        (lambda: AdvantageEstimator(lambda r, g: r[:2], "free"), "it returned 2 advantages of 12 rewards"),
        (lambda: ChatTemplate(lambda m: [1, 2, 3], lambda m: [1], TALK), "tuple.*Sequence.int.. is needed"),
        (lambda: Collator(lambda e: [1], ROWS), r"it returned \[1\], and Mapping.* is needed"),
        (lambda: Collator(collate, ROWS, pads={"id": 9}), "no column 'id', did you mean 'ids'"),
        (lambda: AdapterStart(nn.Linear(2, 2), lambda m: None, lambda m: m(torch.ones(2)), disable=lambda m: None),
         "disable.: it returned None, and AbstractContextManager.* is needed"),
    ],
)  # fmt: skip
def test_a_wrong_declaration_is_one_sentence(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(SubjectError, match=sentence) as caught:
        audit(make())
    assert "earnest-audit laws" in str(caught.value)


def test_an_error_of_a_users_function_is_the_users() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        audit(AdvantageEstimator(lambda rewards, groups: rewards + "", "free"))


def leaks(examples: list[Any]) -> dict[str, Any]:
    ids = collate(examples)["ids"]
    return {"ids": ids + len(examples)}


def test_columns_that_are_padded_are_declared() -> None:
    """Without the padding value a row alone cannot be compared: neither a failure nor a pass."""
    assert {f.subject for f in audit(Collator(leaks, ROWS)).failures} == {"each example alone"}
    rows = {f.subject: f.outcome for f in audit(Collator(collate, ROWS)).findings}
    assert rows["each example alone"] == "not declared" and "fails" not in rows.values()
    assert audit(Collator(collate, ROWS, pads={"ids": 9, "another stage's": 0})).holds


class Plain:
    def __init__(self) -> None:
        self.text, self.me = "x", self


@pytest.mark.parametrize("writes", [False, True])
def test_examples_may_hold_anything(writes: bool) -> None:
    """Arrays, NaN, objects without a comparison: copies of them are equal, and what changed is seen."""
    examples = [{"x": np.array([1.0, np.nan]), "y": float("nan"), "z": Plain(), "w": [torch.tensor(np.nan)]}] * 2

    def fn(rows: list[Any]) -> dict[str, Any]:
        if writes:
            rows[0]["z"].text = "y"
        return {"x": np.stack([row["x"] for row in rows])}

    verdict = audit(Collator(fn, copy.deepcopy(examples)))
    assert {f.subject for f in verdict.failures} == ({"the examples afterwards"} if writes else set())


def test_equal_is_of_every_depth() -> None:
    a = {"x": [np.arange(3), {"y": torch.ones(2)}], "z": (1, None)}
    assert equal(a, copy.deepcopy(a)) and not equal(a, {**a, "x": [np.arange(3), {"y": torch.zeros(2)}]})
    assert not equal([1], [1.0]) and not equal(np.ones(2), np.ones(3)) and not equal({"a": 1}, {"b": 1})


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)
        self.extra: nn.Linear | None = None
        self.merged = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = self.extra is not None and not self.merged
        return self.drop(self.inner(x)) + (self.extra(self.drop(x)) if beside else 0.0)


X = torch.arange(12.0).reshape(4, 3)


def test_dropout_is_off_where_a_subject_calls_a_model() -> None:
    """In train mode, in each subject that compares outputs."""

    def perturb(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)

    def save(model: nn.Module, folder: Any) -> None:
        torch.save(model.state_dict(), folder / "m")

    def load(model: nn.Module, folder: Any) -> None:
        model.load_state_dict(torch.load(folder / "m"))

    def adapt(model: Any) -> None:
        model.requires_grad_(False).extra = nn.Linear(3, 3, bias=False)
        nn.init.zeros_(model.extra.weight)

    assert audit(AdapterStart(Dropped(), adapt, lambda m: m(X))).holds
    assert audit(RoundTrip(Dropped, perturb, save, load, lambda m: m(X))).holds
    assert audit(FirstCall(Dropped, lambda m: m(X), perturb, constant=False)).holds
    model = Dropped()
    adapt(model)
    model.extra.weight.data += 0.1

    def merge(on: bool, factor: float = 1.0) -> None:
        model.inner.weight.data += factor * (on - model.merged) * model.extra.weight.data
        model.merged = on

    merged = MergedLayer(lambda: model(X), lambda: merge(True), lambda: merge(False), model=model)
    assert audit(merged).holds and model.training and model.drop.p == 0.5
    wrong = MergedLayer(lambda: model(X), lambda: merge(True, 0.5), lambda: merge(False), model=model)
    assert audit(wrong).failures
