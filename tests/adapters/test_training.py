"""Each variant overfits a fixed batch, and on held-out data beats a control whose adapter is frozen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from earnest.adapters import attach
from earnest.adapters.conformance import SUBJECTS, tiny_llama
from earnest.adapters.variant import get_variant

LR = {
    "pissa": 5e-3,
    "hra": 1e-2,
    "oft": 2e-2,
    "road": 3e-2,
    "ia3": 1e-1,
    "ia3_ff": 1e-1,
    "vera": 3e-2,
    "antipasto": 3e-2,
}


def rule(rows: int, seed: int) -> Tensor:
    """Sequences with a rule to learn: each token is the previous one plus the row's step, modulo 64."""
    rng = torch.Generator().manual_seed(seed)
    start, step = torch.randint(0, 64, (rows, 1), generator=rng), torch.randint(1, 4, (rows, 1), generator=rng)
    return (start + step * torch.arange(12)) % 64


def nll(model: nn.Module, ids: Tensor) -> Tensor:
    out = model(ids[:, :-1]).logits
    return nn.functional.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("label", SUBJECTS)
def test_overfits_and_generalises_beyond_a_frozen_control(label: str) -> None:
    name, settings = SUBJECTS[label]
    variant = get_variant(name, **settings)
    model = tiny_llama()
    train, held = rule(64, 1), rule(64, 2)
    adapter = attach(
        model, variant, targets=["q_proj", "v_proj", "o_proj", "down_proj"],
        calibration=[train] if variant.wants_calibration() else None,
    )  # fmt: skip
    with torch.no_grad():
        control = float(nll(model, held))  # the adapter at birth, frozen: the base
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=LR.get(name, 1e-2), weight_decay=0.0)
    small, losses = train[:8], []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nll(model, train)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        trained = float(nll(model, held))
    assert trained < control - 0.1, (trained, control)
    for _ in range(25):
        optimizer.zero_grad()
        loss = nll(model, small)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert min(losses[-3:]) < losses[0] - 0.05, losses
