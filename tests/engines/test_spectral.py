"""The spectral norm against torch.linalg on the dense ΔW, its value and its gradient."""

from __future__ import annotations

import pytest
import torch

import earnest as en
from earnest.engines.spectral import spectral_norms
from tests.engines.conftest import perturb, tiny_policy


@pytest.mark.parametrize("variant", [en.LoRA(rank=3), en.LoRA(rank=12)], ids=["fewer than a block", "more"])
def test_value_and_gradient_are_those_of_the_dense_matrix(variant: en.LoRA) -> None:
    adapter = en.attach(tiny_policy(torch.float32), variant, targets=("q_proj", "down_proj"), seed=0)
    perturb(adapter, size=0.5)
    norms = spectral_norms(adapter)
    truth = torch.tensor([float(torch.linalg.matrix_norm(d, 2)) for _, d in adapter.deltas()])
    torch.testing.assert_close(norms, truth, rtol=1e-4, atol=1e-6)
    upstream = torch.linspace(0.5, 2.0, len(truth))
    grads = torch.autograd.grad((norms * upstream).sum(), adapter.parameters())
    step = 1e-3
    for p, g in zip(adapter.parameters(), grads, strict=True):
        with torch.no_grad():
            p.add_(g, alpha=step / float(g.norm()))
            up = float((spectral_norms(adapter) * upstream).sum())
            p.sub_(g, alpha=2 * step / float(g.norm()))
            down = float((spectral_norms(adapter) * upstream).sum())
            p.add_(g, alpha=step / float(g.norm()))
        assert (up - down) / (2 * step) == pytest.approx(float(g.norm()), rel=2e-2)


def test_two_nearly_equal_singular_values_are_separated() -> None:
    """A single vector, iterated twelve times, stayed between them: σ too small, and a derivative that was neither's
    (the audit's law FD saw it at one of twenty seeds).
    """
    adapter = en.attach(tiny_policy(torch.float32), en.LoRA(rank=12, alpha=12), targets=("q_proj",), seed=0)
    with torch.no_grad():
        for slot in adapter.slots.values():
            A, B = slot.tensors["A"], slot.tensors["B"]
            basis = torch.linalg.qr(torch.randn(A.shape[1], 12, generator=torch.Generator().manual_seed(1))).Q
            A.copy_(basis.t())
            B.copy_(torch.linalg.qr(torch.randn(B.shape[0], 12, generator=torch.Generator().manual_seed(2))).Q)
            B.mul_(torch.cat([torch.tensor([1.0, 0.99]), torch.linspace(0.97, 0.5, 10)]))
    norms = spectral_norms(adapter)
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=1e-5, atol=0)
    slot = next(iter(adapter.slots.values()))
    (grad,) = torch.autograd.grad(norms[0], slot.tensors["B"])
    others = grad[:, 1:].norm() / grad[:, 0].norm()
    assert float(others) < 1e-2, "the derivative is the first pair's alone"


def test_at_initialization_value_and_gradient_are_0_not_nan() -> None:
    adapter = en.attach(tiny_policy(torch.float32), en.LoRA(rank=3), targets=("q_proj",), seed=0)
    norms = spectral_norms(adapter)
    grads = torch.autograd.grad(norms.sum(), adapter.parameters())
    assert float(norms.detach().abs().max()) == 0.0 and all(bool(torch.isfinite(g).all()) for g in grads)
