"""Optimizers against torch's own, step by step; their state on disk; rates per group."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

import earnest as en
from earnest.engines.optimizer_state import flatten_optimizer, restore_optimizer
from earnest.engines.optimizers import OPTIMIZERS, Optimizer
from earnest.errors import ConfigError, MissingExtra
from earnest.proving import prove
from earnest.signals import Batch

TORCHAO = pytest.mark.integration
SHAPES = [(6, 4), (5,), (3, 7), (2, 3, 4), (64, 64)]


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """torchao compiles its step, which takes a minute; the same code runs without."""
    with torch.compiler.set_stance("force_eager"):
        yield


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def same(one: list[torch.nn.Parameter], two: list[torch.nn.Parameter]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muon_steps_matrices_as_torch_does_and_the_rest_with_adamw(adjust: Any) -> None:
    """The first two parameters decay, the others do not."""
    ours, theirs = parameters(), parameters()
    spec = en.Muon(
        lr=0.02, momentum=0.8, nesterov=False, ns_steps=3, adjust=adjust, betas=(0.7, 0.9), eps=1e-5, weight_decay=0.1
    )
    optimizer = spec.build(ours[:2], ours[2:])
    muon = {"lr": 0.02, "momentum": 0.8, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": adjust}
    adamw = {"lr": 0.02, "betas": (0.7, 0.9), "eps": 1e-5}
    references = [
        torch.optim.Muon([theirs[0]], weight_decay=0.1, **muon),
        torch.optim.AdamW([theirs[1]], weight_decay=0.1, **adamw),
        torch.optim.Muon([theirs[2]], weight_decay=0.0, **muon),
        torch.optim.AdamW([theirs[3]], weight_decay=0.0, **adamw),
        torch.optim.Muon([theirs[4]], weight_decay=0.0, **muon),
    ]
    for step in range(5):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step()
        for reference in references:
            reference.step()
        assert same(ours, theirs), step


@pytest.mark.integration
def test_8_bit_adamw_steps_as_torchao_does_and_small_tensors_as_torch_does() -> None:
    from torchao.optim import AdamW8bit

    ours, theirs, plain = parameters(), parameters(), parameters()
    spec = en.AdamW8bit(lr=0.02, betas=(0.7, 0.9), eps=1e-5, weight_decay=0.1)
    known: dict[str, Any] = {"lr": 0.02, "betas": (0.7, 0.9), "eps": 1e-5, "weight_decay": 0.1}
    optimizers = [spec.build(ours, []), AdamW8bit(theirs, **known), torch.optim.AdamW(plain, **known)]
    for step in range(4):
        for params, optimizer in zip((ours, theirs, plain), optimizers, strict=True):
            give_gradients(params, step)
            optimizer.step()
        assert same(ours, theirs), step
        for mine, exact in zip(ours[:4], plain[:4], strict=True):
            torch.testing.assert_close(mine, exact, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ours[4], plain[4], rtol=0.0, atol=0.02)
    codes = flatten_optimizer(optimizers[0])[0]["4.exp_avg.codes"]
    assert codes.dtype == torch.uint8 and codes.shape == (64, 64)


def test_without_torchao_the_8_bit_optimizer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(MissingExtra, match=r'adamw8bit needs the package torchao: pip install "earnest\[torchao\]"'):
        en.AdamW8bit().build(parameters(), [])


@pytest.mark.parametrize(
    "spec",
    [
        en.AdamW(lr=0.01),
        en.SGD(lr=0.01, momentum=0.9),
        en.Muon(lr=0.01),
        pytest.param(en.AdamW8bit(lr=0.01), marks=TORCHAO),
    ],
    ids=lambda s: s.kind,
)
def test_a_state_that_was_on_disk_continues_bit_for_bit(spec: Optimizer) -> None:
    straight, resumed = parameters(), parameters()
    first, second = spec.build(straight, []), spec.build(resumed, [])
    for step in range(3):
        give_gradients(straight, step)
        first.step()
    tensors, meta = flatten_optimizer(first)
    restore_optimizer(second, load(save(tensors)), json.loads(json.dumps(meta)))
    with torch.no_grad():
        for p, value in zip(resumed, straight, strict=True):
            p.copy_(value)
    for step in range(3, 6):
        for params, optimizer in ((straight, first), (resumed, second)):
            give_gradients(params, step)
            optimizer.step()
        assert same(straight, resumed), step
    again, meta_again = flatten_optimizer(second)
    now, meta_now = flatten_optimizer(first)
    assert meta_again == meta_now
    assert all(torch.equal(again[k], now[k]) for k in now)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=TORCHAO) if k == "adamw8bit" else k for k in sorted(OPTIMIZERS)]
)
def test_every_optimizer_builds_from_its_defaults(kind: str) -> None:
    params = parameters()
    groups = OPTIMIZERS[kind]().build(params[:1], params[1:]).param_groups
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(map(id, params))


@pytest.mark.parametrize("kind", [en.Muon, pytest.param(en.AdamW8bit, marks=TORCHAO)])
def test_an_engine_is_proved_and_resumes(
    kind: type[Optimizer], make_engine: Callable[..., Any], batch: Batch, tmp_path: Path
) -> None:
    spec = kind(lr=0.01, lr_ratio=4.0, schedule=en.Linear(total=6))
    engine, other = make_engine(optimizer=spec), make_engine(optimizer=spec)
    assert not prove(engine, en.GRPO(), batch, quick=True).failures
    for _ in range(3):
        engine.step(batch, en.GRPO())
    engine.save(tmp_path / "checkpoint")
    other.load(tmp_path / "checkpoint")
    for _ in range(2):
        assert engine.step(batch, en.GRPO()).update == other.step(batch, en.GRPO()).update
    assert same(engine.parameters, other.parameters)


# --- LoRA+ -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [None, en.Linear(total=4, floor=0.1)])
def test_lr_ratio_multiplies_the_rate_of_b_alone(make_engine: Callable[..., Any], batch: Batch, schedule: Any) -> None:
    """SGD's step is lr·gradient, so each tensor's step shows its rate."""
    plain, plus = (
        make_engine(optimizer=en.SGD(lr=0.5, lr_ratio=ratio, schedule=schedule), max_grad_norm=None)
        for ratio in (1.0, 16.0)
    )
    before = [p.detach().clone() for p in plain.parameters]
    plain.step(batch, en.GRPO())
    plus.step(batch, en.GRPO())
    assert plain.learning_rate == plus.learning_rate == 0.5
    for name, start, one, two in zip(plain.names, before, plain.parameters, plus.parameters, strict=True):
        factor = 16.0 if name.endswith(".B") else 1.0
        torch.testing.assert_close(two - start, factor * (one - start), rtol=1e-4, atol=1e-6)
    if schedule is not None:
        plus.step(batch, en.GRPO())
        assert sorted(float(g["lr"]) for g in plus.optimizer.param_groups) == pytest.approx([0.35, 5.6])


def test_lr_ratio_is_refused_where_the_adapter_declares_no_tensors(make_engine: Callable[..., Any]) -> None:
    policy = make_engine().policy
    adapter = en.attach(policy, en.IA3())
    with pytest.raises(ConfigError, match=r"optimizer\.lr_ratio: 2 has no meaning for ia3, .* take lora"):
        en.LocalEngine(policy, adapter, en.AdamW(lr_ratio=2.0))
