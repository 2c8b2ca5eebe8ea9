"""Machinery beside the loss: each defect beside its right twin, which raises nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earnest.audit import (
    Accumulation,
    Census,
    Ema,
    Gather,
    Merge,
    MergedLayer,
    OuterStep,
    Resume,
    RoundTrip,
    Schedule,
    Unbiased,
    WeightSync,
    audit,
)
from tests.audit.steps import Tiny, sft_loss, sft_step

IDS = torch.arange(1, 11)[None]


def failed(subject: Any) -> set[str]:
    return {f.subject for f in audit(subject).failures}


def kick(model: nn.Module, size: float = 0.1) -> None:
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_((size * torch.randn(p.shape, generator=rng)).to(p.dtype))


class Tied(Tiny):
    def __init__(self) -> None:
        super().__init__(0)
        self.head = nn.Linear(16, 23, bias=False)
        self.head.weight = self.embed.weight


# --- save and load ----------------------------------------------------------------------------------------------------


def trip(load: Callable[[Any, Any], Any], make: Callable[[], nn.Module] = Tied, **more: Any) -> RoundTrip:
    def loaded(model: nn.Module, folder: Path) -> Any:
        return load(model, {k: v.clone() for k, v in torch.load(folder / "m").items()})

    return RoundTrip(
        make, kick, lambda m, f: torch.save(m.state_dict(), f / "m"), loaded, more.pop("says", lambda m: m(IDS)), **more
    )


def frozen(model: nn.Module, state: Any) -> None:
    """PEFT #282, TRL #6700: an adapter comes back frozen."""
    model.load_state_dict(state)
    model.requires_grad_(False)


def untied(model: nn.Module, state: Any) -> None:
    """pytorch #188346: assign=True makes two tensors of one."""
    model.load_state_dict(state, assign=True)
    model.requires_grad_(True)


def test_what_outputs_do_not_show_must_survive_too() -> None:
    right = trip(lambda m, s: m.load_state_dict(s))  # whose return value, a report, is no model
    assert audit(right).holds
    assert failed(trip(frozen)) == {"what is trainable"}
    assert audit(trip(frozen, for_training=False)).holds
    assert failed(trip(untied)) == {"tied parameters"}
    assert failed(trip(lambda m, s: m.bfloat16().load_state_dict(s), tolerance=1.0)) == {"dtypes"}


def test_equal_infinities_are_equal() -> None:
    """Masked entries of a vocabulary are -inf on both sides."""

    def says(model: nn.Module) -> Tensor:
        return torch.cat([model(IDS), torch.full((1, 10, 2), -math.inf)], -1)

    assert audit(trip(lambda m, s: m.load_state_dict(s), says=says)).holds
    assert failed(trip(lambda m, s: None, says=says)) == {"save → load"}
    trainer, sampler = Tiny(), Tiny()
    with torch.no_grad():
        right = WeightSync(
            lambda: kick(trainer), lambda: sampler.load_state_dict(trainer.state_dict()),
            lambda: says(trainer).log_softmax(-1), lambda: says(sampler).log_softmax(-1),
        )  # fmt: skip
        assert audit(right).holds


class Dropped:
    """A run whose dropout draws from the global generator, and whose model is made without a seed of its own."""

    def __init__(self, epoch: int = 100) -> None:
        self.model = nn.Sequential(nn.Embedding(23, 8), nn.Dropout(0.2), nn.Linear(8, 23))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.place, self.epoch = 0, epoch

    def go(self, steps: int) -> list[int]:
        seen = []
        for _ in range(steps):
            ids = torch.randint(0, 23, (4, 8), generator=torch.Generator().manual_seed(self.place % self.epoch))
            F.cross_entropy(self.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen.append(self.place % self.epoch)
            self.place += 1
        return seen

    def save(self, folder: Path) -> None:
        state = (self.model.state_dict(), self.optimizer.state_dict(), self.place, torch.get_rng_state())
        torch.save(state, folder / "run")

    def load(self, folder: Path, generator: bool) -> None:
        model, optimizer, self.place, rng = torch.load(folder / "run")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        if generator:
            torch.set_rng_state(rng)


def resume(generator: bool, epoch: int = 100) -> Resume:
    def state(run: Dropped) -> Tensor:
        return torch.cat([p.detach().flatten() for p in run.model.parameters()])

    return Resume(lambda: Dropped(epoch), Dropped.go, Dropped.save, lambda r, f: r.load(f, generator), state)


def test_a_resume_starts_from_one_generator_state_and_leaves_it() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert audit(resume(True)).holds
    assert any("6 steps" in s for s in failed(resume(False)))
    assert torch.get_rng_state().equal(before)


def test_a_resume_says_where_no_epoch_ended() -> None:
    rows = {epoch: {f.subject for f in audit(resume(True, epoch)).findings} for epoch in (4, 100)}
    assert "the end of an epoch" in rows[100] and "the end of an epoch" not in rows[4]


# --- adapters ---------------------------------------------------------------------------------------------------------


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
def test_a_merged_layer_says_what_it_said(looks: bool, remembers: bool) -> None:
    """candle-lora #26: a merged layer adds its adapter again."""
    layer = Layer(looks=looks, remembers=remembers)
    wrong = failed(MergedLayer(layer.says, layer.merge, layer.unmerge))
    assert bool(wrong) == (not (looks and remembers)), wrong
    assert ("outputs, merged" in wrong) == (not looks)


# --- a push -----------------------------------------------------------------------------------------------------------


def sync(size: float, skip: tuple[str, ...] = (), **more: Any) -> WeightSync:
    """A bf16 sampler, its precision declared; a name mapping that forgets some tensors."""
    trainer, sampler = Tiny(), Tiny().to(torch.bfloat16)

    def push() -> None:
        with torch.no_grad():
            for name, p in trainer.named_parameters():
                if not name.startswith(skip or "-"):
                    sampler.get_parameter(name).copy_(p)

    def says(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return model(IDS).float().log_softmax(-1)

    sampler.load_state_dict(trainer.state_dict())
    return WeightSync(
        lambda: kick(trainer, size),
        push,
        lambda: says(trainer),
        lambda: says(sampler),
        precision=torch.bfloat16,
        **more,
    )


@pytest.mark.parametrize("size", [0.02, 0.1])
def test_a_small_kick_in_16_bits_is_judged_by_what_it_leaves(size: float) -> None:
    assert not audit(sync(size)).failures
    assert failed(sync(size, ("out", "mix"))) == {"the sampler follows a kick"}


def test_a_kick_below_the_noise_is_no_failure() -> None:
    (row,) = (f for f in audit(sync(2e-4)).findings if f.subject == "the sampler follows a kick")
    assert row.outcome == "not applicable" and "too small" in row.meaning


def test_undo_leaves_the_trainer_as_it_was() -> None:
    state = {"trainer": torch.linspace(-9, -0.1, 40), "sampler": torch.zeros(40)}

    def kicked(by: float) -> None:
        state["trainer"] = state["trainer"] + by

    def push() -> None:
        state["sampler"] = state["trainer"].clone()

    before = state["trainer"].clone()
    subject = WeightSync(
        lambda: kicked(-0.5), push, lambda: state["trainer"], lambda: state["sampler"], undo=lambda: kicked(0.5)
    )
    assert audit(subject).holds
    assert torch.allclose(state["trainer"], before) and torch.equal(state["sampler"], state["trainer"])


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_push_leaves_the_trainer_alone(copies: bool, dtype: torch.dtype) -> None:
    """Merge, send, unmerge: in bf16 the base drifts; in fp32 by no more than rounding."""
    trainer, sampler, rng = Tiny().to(dtype), Tiny().to(dtype), torch.Generator().manual_seed(0)
    b, a = (0.3 * torch.randn(s, generator=rng).to(dtype) for s in ((16, 3), (3, 16)))

    @torch.no_grad()
    def says(model: nn.Module, beside: bool) -> Tensor:
        held = {n: p.float() for n, p in model.named_parameters()}
        if beside:
            held["out.weight"] = held["out.weight"] + (b @ a).float()
        return torch.func.functional_call(model, held, (IDS,)).log_softmax(-1)

    @torch.no_grad()
    def push() -> None:
        kept = trainer.out.weight.clone()
        trainer.out.weight.add_(b @ a)
        sampler.load_state_dict(trainer.state_dict())
        trainer.out.weight.copy_(kept if copies else trainer.out.weight - b @ a)

    wrong = failed(
        WeightSync(lambda: kick(trainer), push, lambda: says(trainer, True), lambda: says(sampler, False), dtype)
    )
    assert wrong == ({"the trainer after a push"} if dtype == torch.bfloat16 and not copies else set())


# --- replicas, draws, ranks, averages ---------------------------------------------------------------------------------


class Outer:
    """Outer SGD with plain momentum, whose memory is kept (right) or made anew every round."""

    def __init__(self, anew: bool) -> None:
        self.anew, self.memory = anew, torch.zeros(7)

    def __call__(self, start: Tensor, ends: list[Tensor], momentum: float) -> Tensor:
        pseudo = start - torch.stack(ends).mean(0)
        self.memory = momentum * (torch.zeros(7) if self.anew else self.memory) + pseudo
        return start - self.memory


def test_plain_outer_momentum_acts_from_the_second_round() -> None:
    assert audit(OuterStep(Outer(False), {"momentum": 0.0})).holds
    assert failed(OuterStep(Outer(True), {"momentum": 0.0})) == {"knob momentum"}


def test_mixing_shows_where_replicas_differ() -> None:
    def mixed(start: Tensor, ends: list[Tensor], alpha: float, used: bool = True) -> Tensor:
        mean = torch.stack(ends).mean(0)
        return mean + alpha * (ends[0] - mean) if used else mean

    assert audit(OuterStep(mixed, {"alpha": 0.0})).holds
    assert failed(OuterStep(lambda s, e, alpha: mixed(s, e, alpha, False), {"alpha": 0.0})) == {"knob alpha"}


def test_replicas_that_send_16_bits_declare_it() -> None:
    def sent(start: Tensor, ends: list[Tensor]) -> Tensor:
        return start - torch.stack([(start - e).bfloat16().float() for e in ends]).mean(0)

    assert failed(OuterStep(sent))
    assert audit(OuterStep(sent, precision=torch.bfloat16)).holds


@pytest.mark.parametrize("noise", [True, False])
def test_stochastic_rounding_without_noise_is_seen(noise: bool) -> None:
    """OneTrainer #994."""

    def rounded(x: Tensor, _: float) -> Tensor:
        bits = x.contiguous().view(torch.int32)
        more = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32) if noise else 0
        return ((bits + more) & -65536).view(torch.float32)

    before = torch.get_rng_state()
    assert audit(Unbiased(rounded)).holds == noise
    assert torch.get_rng_state().equal(before)


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


def test_an_average_whose_rate_is_its_decay_is_seen() -> None:
    """TRL #4935."""
    assert audit(Ema(lambda a, c, r: a.lerp_(c, r))).holds
    assert audit(Ema(lambda a, c, r: (1 - r) * a + r * c, dtype=torch.bfloat16)).holds
    assert {"rate 0", "rate 1", "rate 0.0625"} <= failed(Ema(lambda a, c, r: a.lerp_(c, 1 - r)))
    still = {"rate 1", "rate 0.0625", "rate 0.0625, a second time", "many updates at rate 0.001"}
    assert failed(Ema(lambda a, c, r: None)) == still
    assert "equal weights" in failed(Ema(lambda a, c, r: a + r * c))


def test_a_census_of_generators_is_read_once() -> None:
    assert audit(Census((n for n in "ab"), (n for n in "ba"))).holds
    assert failed(Census((n for n in "ab"), (n for n in "bc"))) == {"adapted modules"}


# --- schedules --------------------------------------------------------------------------------------------------------


def rates(total: int, warm: int, written_over: bool = False) -> list[tuple[float, float]]:
    factor = [min(1.0, (k + 1) / max(1, warm)) * (total - k) / total for k in range(total)]
    return [(f, f if written_over else 0.1 * f) for f in factor]


def test_a_declared_warm_up_has_to_happen() -> None:
    def schedule(warm: int, declared: int) -> Schedule:
        return Schedule(lambda t, _: [r for r, _ in rates(t, warm)], 1.0, 0.0, warmup=declared)

    assert audit(schedule(4, 4)).holds
    assert failed(schedule(0, 4)) == {"warm-up"}
    assert failed(schedule(1, 4)) == {"warm-up"}


def test_every_group_has_its_own_rate() -> None:
    """hi-ml #611: one rate is written over every group."""
    assert audit(Schedule(lambda t, _: rates(t, 4), (1.0, 0.1), 0.0)).holds
    assert "peak (group 1)" in failed(Schedule(lambda t, _: rates(t, 4, True), (1.0, 0.1), 0.0))


def test_a_short_decay_ends_a_step_above_its_end() -> None:
    assert audit(Schedule(lambda t, _: [1 - k / t for k in range(t)], 1.0, 0.0, total=7)).holds
    assert "end" in failed(Schedule(lambda t, _: [1 - k / (4 * t) for k in range(t)], 1.0, 0.0, total=7))


# --- accumulation -----------------------------------------------------------------------------------------------------


def accumulation(dtype: torch.dtype, wrong: bool = False, auto: bool = False, **more: Any) -> Accumulation:
    step = sft_step(dtype=dtype)

    def accumulate(model: nn.Module, batches: Any) -> None:
        counts = [int((b["labels"][:, 1:] != -100).sum()) for b in batches]
        for batch, count in zip(batches, counts, strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=auto):
                loss = sft_loss(model, batch)[0]
            (loss * count / (counts[0] * len(counts) if wrong else sum(counts))).backward()

    return Accumulation(step.model, accumulate, step.batch, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_micro_batchs_count_for_all_is_seen_in_16_bits_too(dtype: torch.dtype) -> None:
    assert audit(accumulation(dtype)).holds
    assert failed(accumulation(dtype, wrong=True))
    assert not audit(accumulation(dtype, wrong=True, rows_interact=True)).failures, "declared: not judged"


def test_accumulation_knows_autocast() -> None:
    assert audit(accumulation(torch.float32, auto=True)).holds
    assert failed(accumulation(torch.float32, wrong=True, auto=True))


def test_texts_are_cut_with_their_rows() -> None:
    right = accumulation(torch.float32)
    inner, right.batch = right.accumulate, {**right.batch, "texts": [str(i) for i in range(5)], "name": "a batch"}

    def accumulate(model: nn.Module, batches: Any) -> None:
        assert all(len(b["texts"]) == len(b["ids"]) and b["name"] == "a batch" for b in batches)
        inner(model, batches)

    right.accumulate = accumulate
    assert audit(right).holds
