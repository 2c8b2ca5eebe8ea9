"""DoRA (Liu et al. 2024). The column norm of W + BA divides the weight but is DETACHED, so it changes in value and not in gradient (section 4.3 of the paper); magnitude starts at the norm of W."""
FAMILY = "adapters"
KIND = "adapter"
INPUTS = {"base": "frozen linear layer", "x": "[rows, in]"}
SETTINGS = {"r": "rank, 4", "alpha": "4, scale alpha/r = 1"}
NOTES = "Trained: A, B, magnitude. Norm per output row, a constant in backward: finite differences of B and A do not match by intent. Output equals the base at the start. Bias not scaled."
import torch
import torch.nn as nn
import torch.nn.functional as F


class Dora(nn.Module):
    def __init__(self, base, r, alpha):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(r, base.in_features) * 0.2)
        self.B = nn.Parameter(torch.zeros(base.out_features, r))
        self.magnitude = nn.Parameter(base.weight.detach().norm(dim=1))
        self.scale = alpha / r

    def forward(self, x):
        w = self.base.weight + self.scale * self.B @ self.A
        g = self.magnitude / w.norm(dim=1).detach()
        return F.linear(x, w) * g + self.base.bias


def make(seed):
    torch.manual_seed(seed)
    return {"base": nn.Linear(12, 10), "x": torch.randn(5, 12)}


def right(base, r=4, alpha=4):
    return Dora(base, r, alpha)


if __name__ == "__main__":
    b = make(0); m = right(b["base"])
    assert torch.allclose(m(b["x"]), b["base"](b["x"]), atol=1e-5)
    opt = torch.optim.SGD([m.A, m.B, m.magnitude], 1e-2)
    for _ in range(3):
        opt.zero_grad(); m(b["x"]).square().mean().backward(); opt.step()
    w = m.base.weight + m.B @ m.A
    merged = torch.stack([m.magnitude[i] * w[i] / w[i].norm() for i in range(10)])
    assert torch.allclose(m(b["x"]), b["x"] @ merged.t() + m.base.bias, atol=1e-5) and m.magnitude.grad.norm() > 0 and m.A.grad.norm() > 0
    print("merged gap", (m(b["x"]) - b["x"] @ merged.t() - m.base.bias).abs().max().item())
