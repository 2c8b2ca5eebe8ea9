"""Merge and MergedLayer: merges that are off, not linear, or write into their base."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from earnest_audit import (
    Merge,
    MergedLayer,
    audit,
)


def failed(subject: Any) -> set[str]:
    return {f.subject for f in audit(subject).failures}


def test_dora_is_not_linear_by_declaration() -> None:
    rng = torch.Generator().manual_seed(0)
    w, a, b = torch.randn(8, 8, generator=rng), torch.randn(4, 8, generator=rng), torch.randn(8, 4, generator=rng)
    length = w.norm(dim=1, keepdim=True)

    def dora(weight: float, norm_of_base: bool = False) -> Tensor:
        moved = w + 0.1 * weight * b @ a
        return 1.3 * length * moved / (length if norm_of_base else moved.norm(dim=1, keepdim=True)) - 1.3 * w

    assert "merge(-w) = -merge(w)" in failed(Merge(dora, dora)), "without the declaration linearity is asked for"
    assert audit(Merge(dora, dora, linear=False)).holds
    assert failed(Merge(lambda s: dora(s, True), dora, linear=False)) == {"merged = unmerged"}


class Layer:
    def __init__(self, *, looks: bool, remembers: bool) -> None:
        rng = torch.Generator().manual_seed(0)
        self.w, a, b = (torch.randn(s, generator=rng) for s in ((8, 8), (3, 8), (8, 3)))
        self.delta, self.merged, self.looks, self.remembers = 0.1 * b @ a, 0, looks, remembers

    def says(self) -> Tensor:
        return self.w if self.looks and self.merged else self.w + self.delta

    def merge(self) -> None:
        if not (self.remembers and self.merged):
            self.w = self.w + self.delta
        self.merged = 1

    def unmerge(self) -> None:
        self.w, self.merged = self.w - self.delta, 0


@pytest.mark.parametrize(("looks", "remembers"), [(True, True), (False, True), (True, False)])
def test_merging_does_not_change_the_output(looks: bool, remembers: bool) -> None:
    """candle-lora #26: a merged layer adds its adapter again."""
    layer = Layer(looks=looks, remembers=remembers)
    wrong = failed(MergedLayer(layer.says, layer.merge, layer.unmerge))
    assert bool(wrong) == (not (looks and remembers)), wrong
    assert ("outputs, merged" in wrong) == (not looks)


DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def factors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    a, b, w = (torch.randn(s, generator=rng).to(dtype) for s in ((3, 8), (8, 3), (8, 8)))
    return 0.05 * a, b, 4 * w


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_merge_into_large_weights_holds(dtype: torch.dtype) -> None:
    """merged - base, in the base's own dtype: as coarse as the base is."""
    a, b, w = factors(dtype)
    assert audit(Merge(lambda s: (w + s * (b @ a)) - w)).holds


def test_a_merge_by_the_weights_root_or_slightly_off_is_seen() -> None:
    a, b, _ = factors(torch.float32)
    wrong = audit(Merge(lambda s: abs(s) ** 0.5 * (b @ a)))
    assert {f.subject for f in wrong.failures} == {"merge(-w) = -merge(w)", "merge(½) = ½·merge(1)"}
    near = audit(Merge(lambda s: s * (b @ a), lambda s: 1.0005 * s * (b @ a)))
    assert {f.subject for f in near.failures} == {"merged = unmerged"}, "5e-4 is far above fp32's rounding"


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


def test_an_adapter_that_can_be_merged_only_once_declares_that() -> None:
    rng = torch.Generator().manual_seed(0)
    w, delta = torch.randn(6, 6, generator=rng), 0.1 * torch.randn(6, 6, generator=rng)

    def once(scale: float = 1.0) -> Merge:
        merged: list[Tensor] = []

        def merge(weight: float) -> Tensor:
            assert not merged, "merged already"
            merged.append(w + weight * scale * delta)
            return merged[0] - w

        return Merge(merge, lambda weight: weight * delta, once=True)

    assert audit(once()).holds
    assert failed(once(scale=0.5)) == {"merged = unmerged"}
