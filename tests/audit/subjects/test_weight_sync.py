"""WeightSync: pushes that do not arrive, arrive late, or change the trainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from earnest_audit import (
    RoundTrip,
    WeightSync,
    audit,
)
from tests.audit.steps import Tiny
from tests.audit.subjects.test_round_trip import Tied

IDS = torch.arange(1, 11)[None]


def failed(subject: Any) -> set[str]:
    return {f.subject for f in audit(subject).failures}


def kick(model: nn.Module, size: float = 0.1) -> None:
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_((size * torch.randn(p.shape, generator=rng)).to(p.dtype))


def trip(load: Callable[[Any, Any], Any], make: Callable[[], nn.Module] = Tied, **more: Any) -> RoundTrip:
    def loaded(model: nn.Module, folder: Path) -> Any:
        return load(model, {k: v.clone() for k, v in torch.load(folder / "m").items()})

    return RoundTrip(
        make, kick, lambda m, f: torch.save(m.state_dict(), f / "m"), loaded, more.pop("says", lambda m: m(IDS)), **more
    )


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


@pytest.mark.parametrize(("skip", "told"), [(("out", "mix"), "The sampler moved"), (("",), "did not reach")])
def test_a_sampler_that_moved_is_told_from_one_that_did_not(skip: tuple[str, ...], told: str) -> None:
    (row,) = (f for f in audit(sync(0.1, skip)).failures if f.subject == "the sampler follows a perturbation")
    assert told in row.meaning


@pytest.mark.parametrize("size", [0.02, 0.1])
def test_a_small_perturbation_in_16_bits_is_judged_by_what_it_leaves(size: float) -> None:
    assert not audit(sync(size)).failures
    assert failed(sync(size, ("out", "mix"))) == {"the sampler follows a perturbation"}


def test_a_perturbation_below_the_noise_is_no_failure() -> None:
    (row,) = (f for f in audit(sync(2e-4)).findings if f.subject == "the sampler follows a perturbation")
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
    assert all(v.equal(trainer.state_dict()[k]) for k, v in before.items()), "restored"


def test_what_training_does_not_move_need_not_be_sent() -> None:
    assert audit(pushed("mean")[0]).holds, "buffers are asked about by name only; frozen weights never"
    undeclared = pushed("inner.head.bias")[0]
    undeclared.model = None
    assert audit(undeclared).holds and ALONE in {f.subject for f in audit(undeclared).findings}


def test_a_second_push_is_one() -> None:
    assert failed(pushed("what came first")[0]) == {"the sampler follows a perturbation"}
