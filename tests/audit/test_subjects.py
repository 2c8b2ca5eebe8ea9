"""Subjects whose tolerance is computed: right ones hold in their dtype, and a small fault is not inside the room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest.audit import Accumulation, AdvantageEstimator, Merge, OuterStep, RoundTrip, WeightSync, audit
from earnest.audit.laws.__main__ import table
from tests.audit.steps import sft_loss, sft_step

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


@pytest.mark.parametrize("off", [0.0, 4e-4])
def test_a_push_that_is_slightly_off_is_seen(off: float) -> None:
    state = {"trainer": torch.linspace(-9, -0.1, 40), "sampler": torch.zeros(40)}

    def kick() -> None:
        state["trainer"] = state["trainer"] - 0.3

    def push() -> None:
        state["sampler"] = state["trainer"] * (1 + off)

    def says(who: str, precision: torch.dtype | None = None) -> WeightSync:
        return WeightSync(kick, push, lambda: state["trainer"], lambda: state[who], precision=precision)

    assert audit(says("sampler")).holds == (off == 0)
    assert audit(says("sampler", torch.bfloat16)).holds, "in bf16 that is rounding, if it is declared"


@pytest.mark.parametrize("off", [0.0, 1e-4])
def test_an_outer_step_that_is_slightly_off_is_seen(off: float) -> None:
    def step(start: Tensor, ends: list[Tensor]) -> Tensor:
        return start + (1 + off) * (torch.stack(ends) - start).mean(0)

    assert audit(OuterStep(step)).holds == (off == 0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("constant", [1e-8, 1e-6, 1e-4])
def test_advantages_with_the_usual_constants_hold(constant: float, seed: int) -> None:
    def grouped(rewards: Tensor, groups: Tensor, leak: float = 0.0) -> Tensor:
        out = torch.zeros_like(rewards)
        for g in groups.unique():
            mine = rewards[groups == g]
            out[groups == g] = (mine - mine.mean() + leak * rewards.mean()) / (mine.std(correction=0) + constant)
        return out

    assert audit(AdvantageEstimator(grouped, "free", seed=seed)).holds
    leaky = audit(AdvantageEstimator(lambda r, g: grouped(r, g, 0.01), "free", seed=seed))
    assert "shift of one group" in {f.subject for f in leaky.failures}


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


def test_a_save_that_loses_everything_is_seen() -> None:
    def trip(keep: bool) -> RoundTrip:
        return RoundTrip(
            make=lambda: torch.zeros(3), kick=lambda x: x.add_(1.0),
            save=lambda x, f: torch.save(x if keep else torch.zeros(3), f / "x"),
            load=lambda x, f: x.copy_(torch.load(Path(f) / "x")), outputs=lambda x: x,
        )  # fmt: skip

    assert audit(trip(True)).holds
    assert {f.law for f in audit(trip(False)).failures} == {"RT"}


def test_the_generated_table_has_every_law() -> None:
    lines = table().splitlines()[2:]
    codes = {line.split("|")[1].split(",")[0].strip() for line in lines}
    assert {"GL", "IG", "KG", "LAW", "SE", "MI", "CV", "DF", "RT", "MR", "FD", "DR", "F64", "MU"} == codes
    for subject in ("AdvantageEstimator", "Accumulation", "RoundTrip", "Resume", "Merge", "WeightSync", "Schedule",
                    "OuterStep", "Unbiased", "Gather", "Census", "Update", "Ema", "MergedLayer"):  # fmt: skip
        assert sum(f"({subject})" in line.split("|")[1] for line in lines) == 1, subject
