"""Each variant overfits a fixed batch, and on held-out data beats a control whose adapter is frozen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from earnest.adapters import Adapter, attach
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
OVERFIT = 0.5
"""The largest share of the initial loss that may remain on a fixed batch."""
FEW = {"ia3": 0.8, "ia3_ff": 0.8, "antipasto": 0.8, "vera": 0.85}
"""The same for variants with little more than one gain or λ per channel or direction."""


def rule(rows: int, seed: int) -> Tensor:
    """Sequences with a rule to learn: each token is the previous one plus the row's step, modulo 64."""
    rng = torch.Generator().manual_seed(seed)
    start, step = torch.randint(0, 64, (rows, 1), generator=rng), torch.randint(1, 4, (rows, 1), generator=rng)
    return (start + step * torch.arange(12)) % 64


def nll(model: nn.Module, ids: Tensor) -> Tensor:
    out = model(ids[:, :-1]).logits
    return nn.functional.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())


def initialized(label: str) -> tuple[nn.Module, Adapter, float]:
    name, settings = SUBJECTS[label]
    variant, model = get_variant(name, **settings), tiny_llama()
    adapter = attach(
        model, variant, targets=["q_proj", "v_proj", "o_proj", "down_proj"],
        calibration=[rule(64, 1)] if variant.wants_calibration() else None,
    )  # fmt: skip
    return model, adapter, LR.get(name, 1e-2)


def train(model: nn.Module, adapter: Adapter, lr: float, ids: Tensor, steps: int) -> list[float]:
    """The loss before each step and after the last. A frozen adapter goes through the same loop."""
    optimizer = torch.optim.AdamW(
        [t for t in adapter.named_tensors().values() if isinstance(t, nn.Parameter)], lr=lr, weight_decay=0.0
    )
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nll(model, ids)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        return [*losses, float(nll(model, ids))]


@pytest.mark.parametrize("label", SUBJECTS)
def test_overfits_a_fixed_batch_from_initialization(label: str) -> None:
    model, adapter, lr = initialized(label)
    losses = train(model, adapter, lr, rule(64, 1)[:8], 60)
    assert losses[-1] < FEW.get(SUBJECTS[label][0], OVERFIT) * losses[0], (losses[0], losses[-1])


@pytest.mark.parametrize("label", SUBJECTS)
def test_generalises_beyond_a_frozen_control(label: str) -> None:
    ends = {}
    for frozen in (False, True):
        model, adapter, lr = initialized(label)
        adapter.freeze(frozen)
        losses = train(model, adapter, lr, rule(64, 1), 10 if frozen else 40)  # it does not change: a few steps suffice
        with torch.no_grad():
            ends[frozen] = float(nll(model, rule(64, 2)))
        assert (losses[-1] == losses[0]) is frozen, "nothing but the adapter learns"
    assert ends[False] < ends[True] - 0.1, ends
