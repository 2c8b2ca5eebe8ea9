"""Adapters that a guard accepts: each variant's declaration that ΔW is linear in its trained tensors, checked
numerically."""

from __future__ import annotations

import pytest
import torch

import earnest as en
from earnest.adapters.conformance import tiny_llama
from earnest.adapters.variant import VARIANTS, get_variant
from earnest.guards import Directions, Erase, Route
from tests.guards.conftest import Make, triples

ROWS = [
    (label, cls.name, dict(settings))
    for cls in VARIANTS.values()
    for label, settings in (cls.examples or {cls.name: {}}).items()
]


@pytest.mark.parametrize(("label", "name", "fields"), ROWS, ids=[r[0] for r in ROWS])
def test_the_declaration_is_true(label: str, name: str, fields: dict[str, object]) -> None:
    """ΔW(θ + θ') = ΔW(θ) + ΔW(θ') holds exactly for the variants that declare it, also far from initialization."""
    del label
    model = tiny_llama()
    calibration = [torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))]
    variant = get_variant(name, **fields)
    adapter = en.attach(model, variant, calibration=calibration if variant.wants_calibration() else None, seed=0)
    rng = torch.Generator().manual_seed(1)
    initial = [p.detach().clone() for p in adapter.parameters()]
    moves = [[0.3 * torch.randn(p.shape, generator=rng) for p in initial] for _ in range(2)]

    def deltas(*chosen: list[torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            for i, p in enumerate(adapter.parameters()):
                p.copy_(initial[i] + sum(move[i] for move in chosen))
            return torch.cat([d.flatten() for _, d in adapter.deltas()])

    whole, parts = deltas(*moves), deltas(moves[0]) + deltas(moves[1])
    off = float((whole - parts).norm() / whole.norm())
    assert (off < 1e-5) == variant.linear(), f"off by {off:.2g}, declared linear: {variant.linear()}"
    assert off < 1e-5 or off > 1e-3, "clearly one or the other"


@pytest.mark.parametrize(
    "variant",
    [
        en.LoRA(rank=2, freeze_a=True),
        en.VeRA(rank=4, freeze_d=True),
        en.IA3(),
        en.AntiPaSTO(rank=None, block=0, gain="delta"),
    ],
    ids=lambda v: v.name,
)
def test_linear_adapters_are_guarded(make: Make, batches: list[en.Batch], variant: object) -> None:
    loss = en.GRPO(clip=0.5)
    found: Directions = en.directions_from_gradients(make(adapter=variant), triples(), loss, top=2)
    free, routed = make(adapter=variant), make(Route(found), adapter=variant)
    erased = make(Erase(found, gate="two_sided"), adapter=variant)
    for batch in batches[:3]:
        free.step(batch, loss)
        report = routed.step(batch, loss).update.guard
        assert erased.step(batch, loss).update.guard["leak_update"] < 1e-6
    assert all(torch.equal(p, q) for p, q in zip(free.parameters, routed.parameters, strict=True))
    assert report["quarantine"] > 0
