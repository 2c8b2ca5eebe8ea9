"""rsLoRA (Kalajdzievski 2023). The scale is alpha/sqrt(r), not alpha/r; B starts at zero, so in the first step A has an exactly zero gradient. Both are intended."""
FAMILY = "adapters"
KIND = "adapter"
INPUTS = {"base": "frozen linear layer", "x": "[rows, in]"}
SETTINGS = {"r": "rank, 4", "alpha": "8; scale alpha/sqrt(r) = 4"}
NOTES = "The base is frozen; A and B are trained; A's gradient is zero while B is zero. Merged weight: W + scale * B A. Output equals the base at the start."
import math
import torch
import torch.nn as nn


class RsLora(nn.Module):
    def __init__(self, base, r, alpha):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(r, base.in_features) / math.sqrt(base.in_features))
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / math.sqrt(r)

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.A.t()) @ self.B.t()

    def merged(self):
        return self.base.weight + self.scale * self.B @ self.A


def make(seed):
    torch.manual_seed(seed)
    return {"base": nn.Linear(12, 10), "x": torch.randn(5, 12)}


def right(base, r=4, alpha=8):
    return RsLora(base, r, alpha)


if __name__ == "__main__":
    b = make(0); m = right(b["base"])
    assert torch.equal(m(b["x"]), b["base"](b["x"]))
    m(b["x"]).square().sum().backward()
    assert m.A.grad.norm() == 0 and m.B.grad.norm() > 0 and b["base"].weight.grad is None
    with torch.no_grad():
        m.B -= 0.01 * m.B.grad
    m(b["x"]).square().sum().backward()
    assert m.A.grad.norm() > 0 and torch.allclose(m(b["x"]), b["x"] @ m.merged().t() + b["base"].bias, atol=1e-5)
    print("grad of B", m.B.grad.norm().item(), "grad of A after one step", m.A.grad.norm().item())
