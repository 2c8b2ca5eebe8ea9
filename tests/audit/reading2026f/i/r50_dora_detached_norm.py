"""DoRA (Liu et al. 2024) with its section 4.3. The weight is magnitude * direction; the norm in the denominator is DETACHED, so autograd is not the true derivative (the paper does this to save memory), B starts at zero
and A gets no gradient at the first step, and the magnitude starts at the norm of the frozen weight, so the output is unchanged at the start."""
FAMILY = "adapter"
KIND = "adapter"
INPUTS = {"linear": "the nn.Linear to be wrapped (frozen by it)", "x": "input, [rows, 6]"}
SETTINGS = {"r": "rank, 2", "alpha": "scale numerator, 4 (scale = alpha / r)"}
NOTES = "right(linear) returns the wrapper. Trained: A, B and magnitude; the base weight and bias are frozen. Norm per output row (dim=1 of the weight). merge() gives an nn.Linear with the same output. A's gradient is exactly zero at step 0 because B is zero; that is right."
import math
import torch
import torch.nn as nn
import torch.nn.functional as F


def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    return {"linear": nn.Linear(6, 5), "x": torch.randn(4, 6, generator=g)}


class DoRA(nn.Module):
    def __init__(self, linear, r, alpha):
        super().__init__()
        self.base = linear.requires_grad_(False)
        out, inp = linear.weight.shape
        self.A, self.B, self.scale = nn.Parameter(torch.empty(r, inp)), nn.Parameter(torch.zeros(out, r)), alpha / r
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.magnitude = nn.Parameter(linear.weight.norm(dim=1).clone())

    def weight(self):
        v = self.base.weight + self.scale * self.B @ self.A
        return (self.magnitude / v.norm(dim=1).detach())[:, None] * v

    def forward(self, x):
        return F.linear(x, self.weight(), self.base.bias)

    @torch.no_grad()
    def merge(self):
        new = nn.Linear(self.base.in_features, self.base.out_features, bias=self.base.bias is not None)
        new.weight.copy_(self.weight())
        if self.base.bias is not None:
            new.bias.copy_(self.base.bias)
        return new


def right(linear, r=2, alpha=4):
    return DoRA(linear, r, alpha)


if __name__ == "__main__":
    d = make(0); x = d["x"]; before = d["linear"](x).detach(); frozen = d["linear"].weight.clone()
    m = right(d["linear"])
    assert torch.allclose(m(x), before, atol=1e-6)
    m(x).square().sum().backward()
    assert float(m.A.grad.abs().max()) == 0 and float(m.B.grad.abs().max()) > 0 and float(m.magnitude.grad.abs().max()) > 0
    opt = torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=0.05)
    first = m(x).square().mean().item()
    for _ in range(30):
        opt.zero_grad(); loss = m(x).square().mean(); loss.backward(); opt.step()
    assert float(m.A.grad.abs().max()) > 0 and loss.item() < first and torch.equal(frozen, m.base.weight)
    assert torch.allclose(m.merge()(x), m(x), atol=1e-5)
    w = m.weight().detach()
    for i in range(5):
        v = frozen[i] + 2.0 * m.B[i] @ m.A
        assert torch.allclose(w[i], m.magnitude[i] * v / v.norm(), atol=1e-5)
    print("ok", first, "->", loss.item())
