"""PiSSA (Meng et al. 2024). The adapter starts at the principal singular directions and the BASE weight is overwritten with the residual; neither adapter is zero at the start, yet the output is unchanged."""
FAMILY = "adapters"
KIND = "adapter"
INPUTS = {"base": "linear layer whose weight is changed in place", "x": "[rows, in]"}
SETTINGS = {"r": "rank, 3"}
NOTES = "The base weight is modified once at wrapping and then frozen: an adapter alone cannot be put on the original weights (convert by subtracting the start). Scale 1."
import torch
import torch.nn as nn


class Pissa(nn.Module):
    def __init__(self, base, r):
        super().__init__()
        u, s, vh = torch.linalg.svd(base.weight.detach(), full_matrices=False)
        root = s[:r].sqrt()
        self.B = nn.Parameter(u[:, :r] * root)
        self.A = nn.Parameter(root[:, None] * vh[:r])
        self.base = base.requires_grad_(False)
        self.base.weight.data -= (self.B @ self.A).data

    def forward(self, x):
        return self.base(x) + (x @ self.A.t()) @ self.B.t()


def make(seed):
    torch.manual_seed(seed)
    return {"base": nn.Linear(12, 10), "x": torch.randn(5, 12)}


def right(base, r=3):
    return Pissa(base, r)


if __name__ == "__main__":
    b = make(0); before, w = b["base"](b["x"]).detach(), b["base"].weight.detach().clone()
    m = right(b["base"]); y = m(b["x"])
    assert torch.allclose(before, y, atol=1e-5) and torch.allclose(m.base.weight + m.B @ m.A, w, atol=1e-5) and not torch.allclose(m.base.weight, w, atol=1e-3)
    y.square().sum().backward()
    assert m.A.grad.norm() > 0 and m.B.grad.norm() > 0 and m.base.weight.grad is None
    print("output gap", (before - y).abs().max().item(), "grads", m.A.grad.norm().item(), m.B.grad.norm().item())
