"""Gather: what every rank sent is what every rank has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from earnest_audit import (
    Gather,
    audit,
)


def failed(subject: Any) -> set[str]:
    return {f.subject for f in audit(subject).failures}


def test_every_element_of_a_gather_is_compared() -> None:
    def padded(values: list[Tensor], cut: bool) -> list[Tensor]:
        width = -(-max(map(len, values)) // 4) * 4
        return [F.pad(v, (0, width - len(v)))[: len(v) if cut else None] for v in values]

    def stacked(values: list[Tensor]) -> list[Tensor]:
        return list(torch.stack(values))

    assert audit(Gather(stacked)).holds, "ragged ranks are only sent where they are declared"
    assert audit(Gather(lambda v: padded(v, True), ragged=True)).holds
    assert failed(Gather(lambda v: padded(v, False), ragged=True)) == {"ranks", "ranks of different lengths"}
    assert failed(Gather(lambda v: [t.flip(0) for t in v]))


def padded(values: list[Tensor], pad: float, by_value: bool) -> list[Tensor]:
    """Padded to one width, and cut back by the lengths that were sent too, or by value."""
    width = max(map(len, values)) + 1
    wide = [torch.cat([v, v.new_full((width - len(v),), pad)]) for v in values]
    return [w[w != pad] if by_value else w[: len(v)] for w, v in zip(wide, values, strict=True)]


@pytest.mark.parametrize("pad", [0.0, -100.0, -1.0])
def test_values_that_look_like_padding_are_received(pad: float) -> None:
    for ragged in (False, True):
        assert audit(Gather(lambda v: padded(v, pad, False), ragged=ragged)).holds
        assert failed(Gather(lambda v: padded(v, pad, True), ragged=ragged)) == {"values such as 0 and -100"}
        assert audit(Gather(lambda v: padded(v, pad, True), ragged=ragged, padding=pad)).holds


def test_twelve_ranks_arrive_in_the_order_of_their_numbers() -> None:
    def named(values: list[Tensor], number: bool) -> list[Tensor]:
        shelf = {f"rank{i}": v for i, v in enumerate(values)}
        return [shelf[n] for n in sorted(shelf, key=(lambda n: int(n[4:])) if number else None)]

    assert audit(Gather(lambda v: named(v, True))).holds
    assert failed(Gather(lambda v: named(v, False))) == {"12 ranks"}
    assert failed(Gather(lambda v: named(v, False), ranks=16))

    def three(values: list[Tensor]) -> list[Tensor]:
        a, b, c = values
        return [a, b, c]

    assert audit(Gather(three)).holds and audit(Gather(lambda v: v[:3])).holds, "a simulation of three ranks"


def test_what_is_gathered_may_be_read_once() -> None:
    def ordered(values: list[Tensor], by_name: bool) -> Any:
        places = sorted(range(len(values)), key=str if by_name else None)
        return (values[place] for place in places)

    assert audit(Gather(lambda v: ordered(v, False))).strict().holds is audit(Gather(list)).strict().holds
    assert failed(Gather(lambda v: ordered(v, True))) == {"12 ranks"}
