"""Census: what was asked for is what is there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from earnest_audit import (
    Census,
    audit,
)


def failed(subject: Any) -> set[str]:
    return {f.subject for f in audit(subject).failures}


def test_a_census_of_generators_is_read_once() -> None:
    assert audit(Census((n for n in "ab"), (n for n in "ba"))).holds
    assert failed(Census((n for n in "ab"), (n for n in "bc"))) == {"adapted modules"}


def factors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    a, b, w = (torch.randn(s, generator=rng).to(dtype) for s in ((3, 8), (8, 3), (8, 8)))
    return 0.05 * a, b, 4 * w


def test_a_census_counts() -> None:
    assert audit(Census({"a": 3, "b": 4}, {"b": 4, "a": 3}, "rows")).holds
    assert failed(Census({"a": 3, "b": 4}, {"b": 5, "a": 3}, "rows")) == {"rows, how many"}
    assert failed(Census({"a": 3, "b": 4}, {"b": 4}, "rows")) == {"rows"}
    assert audit(Census({"a": 0.1 + 0.2}, {"a": 0.3}, "rewards")).holds, "up to rounding"
    assert failed(Census({"a": 0.3}, {"a": 0.301}, "rewards")) == {"rewards, how many"}
    assert failed(Census({"a": 10**7}, {"a": 10**7 + 1}, "tokens")) == {"tokens, how many"}, "whole numbers exactly"
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    assert audit(Census(dict(one.named_parameters()), dict(two.named_parameters()))).holds, "values that are no numbers"
    assert audit(Census([*"ab"], [*"aabb"])).holds, "a module has two factors, say"
    assert failed(Census([*"ab"], [*"aab"], once=True)) == {"adapted modules, each once"}
    assert audit(Census((n for n in "ab"), (n for n in "ba"), once=True)).holds
