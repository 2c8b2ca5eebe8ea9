"""The spectral norm against torch.linalg on the dense ΔW, its value and its gradient."""

from __future__ import annotations

import pytest
import torch

import earnest as en
from earnest.engines.spectral import spectral_norms
from tests.engines.conftest import kick, tiny_policy


@pytest.mark.parametrize("variant", [en.LoRA(rank=3)], ids=["lora"])
def test_value_and_gradient_are_those_of_the_dense_matrix(variant: en.LoRA) -> None:
    adapter = en.attach(tiny_policy(torch.float32), variant, targets=("q_proj", "down_proj"), seed=0)
    kick(adapter, size=0.5)
    norms = spectral_norms(adapter, 60)
    truth = torch.tensor([float(torch.linalg.matrix_norm(d, 2)) for _, d in adapter.deltas()])
    torch.testing.assert_close(norms, truth, rtol=1e-4, atol=1e-6)
    upstream = torch.linspace(0.5, 2.0, len(truth))
    grads = torch.autograd.grad((norms * upstream).sum(), adapter.parameters())
    step = 1e-3
    for p, g in zip(adapter.parameters(), grads, strict=True):
        with torch.no_grad():
            p.add_(g, alpha=step / float(g.norm()))
            up = float((spectral_norms(adapter, 60) * upstream).sum())
            p.sub_(g, alpha=2 * step / float(g.norm()))
            down = float((spectral_norms(adapter, 60) * upstream).sum())
            p.add_(g, alpha=step / float(g.norm()))
        assert (up - down) / (2 * step) == pytest.approx(float(g.norm()), rel=2e-2)


def test_at_birth_value_and_gradient_are_0_not_nan() -> None:
    adapter = en.attach(tiny_policy(torch.float32), en.LoRA(rank=3), targets=("q_proj",), seed=0)
    norms = spectral_norms(adapter, 5)
    grads = torch.autograd.grad(norms.sum(), adapter.parameters())
    assert float(norms.detach().abs().max()) == 0.0 and all(bool(torch.isfinite(g).all()) for g in grads)
