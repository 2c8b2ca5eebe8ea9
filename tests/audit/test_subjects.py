"""Subjects whose tolerance is computed: right ones hold in their dtype, and a small fault is not inside the room; and
what is asked of schedules, ranks, names and pushes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest.audit import (
    Accumulation,
    AdvantageEstimator,
    Census,
    Gather,
    Merge,
    OuterStep,
    RoundTrip,
    Schedule,
    WeightSync,
    audit,
)
from earnest.audit.laws.__main__ import table
from tests.audit.steps import Tiny, sft_loss, sft_step

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def failed(subject: Any) -> set[str]:
    return {f.subject for f in audit(subject).failures}


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


# --- schedules, ranks, names ------------------------------------------------------------------------------------------


def warm(total: int, shape: str, cycles: float = 0.5, steps: int = 5) -> list[float]:
    found = []
    for k in range(total):
        x = max(0, k - steps) / max(1, total - steps - 1)
        after = {
            "cosine": 0.5 * (1 + math.cos(2 * math.pi * cycles * x)),
            "linear": 1 - x,
            "stable": min(1.0, 4 * (1 - x)),
            "root": math.sqrt(1 / (1 + 400 * x)),
        }[shape]
        found.append((k + 1) / (steps + 1) if k < steps else after)
    return found


@pytest.mark.parametrize("shape", ["cosine", "linear", "stable", "root"])
@pytest.mark.parametrize("total", [13, 40, 400])
def test_a_schedule_falls_after_its_warm_up(shape: str, total: int) -> None:
    final = warm(total, shape)[-1]
    assert audit(Schedule(lambda t, _: warm(t, shape), 1.0, final, total, warmup=5)).holds


def test_a_schedule_that_rises_again_is_seen() -> None:
    """Cycles of a cosine where half of one is meant."""
    again = Schedule(lambda t, _: warm(t, "cosine", 1.5), 1.0, 0.0, warmup=5)
    assert failed(again) == {"after the warm-up"}
    assert audit(Schedule(lambda t, _: warm(t, "cosine", 1.5), 1.0, 0.0, warmup=5, restarts=True)).holds
    assert audit(Schedule(lambda t, _: warm(t, "cosine", 1.5), 1.0, 0.0)).holds, "nothing is declared of its shape"


def padded(values: list[Tensor], pad: float, by_value: bool) -> list[Tensor]:
    """Padded to one width, and cut back by the lengths that were sent too, or by value."""
    width = max(map(len, values)) + 1
    wide = [torch.cat([v, v.new_full((width - len(v),), pad)]) for v in values]
    return [w[w != pad] if by_value else w[: len(v)] for w, v in zip(wide, values, strict=True)]


@pytest.mark.parametrize("pad", [0.0, -100.0, -1.0])
def test_what_looks_like_padding_arrives(pad: float) -> None:
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


def test_a_census_counts() -> None:
    assert audit(Census({"a": 3, "b": 4}, {"b": 4, "a": 3}, "rows")).holds
    assert failed(Census({"a": 3, "b": 4}, {"b": 5, "a": 3}, "rows")) == {"rows, how many"}
    assert failed(Census({"a": 3, "b": 4}, {"b": 4}, "rows")) == {"rows"}
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    assert audit(Census(dict(one.named_parameters()), dict(two.named_parameters()))).holds, "values that are no numbers"
    assert audit(Census("ab", "aabb")).holds, "a module has two factors, say"
    assert failed(Census("ab", "aab", once=True)) == {"adapted modules, each once"}
    assert audit(Census((n for n in "ab"), (n for n in "ba"), once=True)).holds


# --- each tensor of a push --------------------------------------------------------------------------------------------

TEXT = torch.arange(1, 11)[None]
ALONE = "each tensor alone"


class Pushed(nn.Module):
    """A head that is tied to the embedding (or not), a buffer that training moves, a constant, and frozen weights."""

    mean: Tensor
    table: Tensor

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.inner = Tiny()
        self.inner.mix.requires_grad_(False)
        self.tail = nn.Linear(16, 23, bias=False)
        if tied:
            self.tail.weight = self.inner.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(23))
        self.register_buffer("table", torch.linspace(0.5, 1, 23))

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids) * self.table + self.tail(self.inner.embed(ids)) - self.mean


def pushed(lost: str = "", dtype: torch.dtype = torch.float32, **more: Any) -> tuple[WeightSync, nn.Module]:
    trainer, sampler = Pushed(), Pushed(tied=lost != "a copy of the tied head").to(dtype)
    sampler.load_state_dict(trainer.state_dict())
    sent: dict[str, Tensor] = {}

    def push() -> None:
        trained = {n for n, p in trainer.named_parameters(remove_duplicate=False) if p.requires_grad} | {"mean"}
        for name, value in trainer.state_dict(keep_vars=False).items():
            if name in trained and name != lost and not (lost == "a copy of the tied head" and name == "tail.weight"):
                sent.setdefault(name, value.clone())
                if lost != "what came first":
                    sent[name] = value.clone()
        sampler.load_state_dict(sent, strict=False)

    def kick() -> None:
        with torch.no_grad():
            trainer.inner.out.weight.add_(0.3)

    @torch.no_grad()
    def says(model: nn.Module) -> Tensor:
        return model(TEXT).float().log_softmax(-1)

    return WeightSync(
        kick, push, lambda: says(trainer), lambda: says(sampler), dtype if dtype != torch.float32 else None,
        model=trainer, **more,
    ), trainer  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lost", ["", "inner.head.bias", "inner.out.bias", "a copy of the tied head", "mean"])
def test_each_tensor_of_a_push_arrives(lost: str, dtype: torch.dtype) -> None:
    subject, trainer = pushed(lost, dtype, buffers=("mean",))
    before = {k: v.clone() for k, v in trainer.state_dict().items() if k != "inner.out.weight"}
    verdict = audit(subject)
    assert {f.subject for f in verdict.failures} == ({ALONE} if lost else set()), str(verdict)
    (row,) = (f for f in verdict.findings if f.subject == ALONE)
    assert "unused" in row.measured, "what does not show is said"
    assert all(v.equal(trainer.state_dict()[k]) for k, v in before.items()), "put back"


def test_what_training_does_not_move_need_not_be_sent() -> None:
    assert audit(pushed("mean")[0]).holds, "buffers are asked about by name only; frozen weights never"
    undeclared = pushed("inner.head.bias")[0]
    undeclared.model = None
    assert audit(undeclared).holds and ALONE in {f.subject for f in audit(undeclared).findings}


def test_a_second_push_is_one() -> None:
    assert failed(pushed("what came first")[0]) == {"the sampler follows a kick"}
