"""DoRA adapter: the weight is magnitude * (W + BA) / norm, with the norm DETACHED, so the gradient is by design not that of the written function; section 4.3 of the paper shows that this saves memory at no loss (Liu et al. 2024; peft). The norm is taken over the input dimension, one per output."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "adapters"
KIND = "adapter"
INPUTS = {"linear": "nn.Linear to be wrapped", "x": "input, [rows, in]"}
SETTINGS = {"rank": "2", "alpha": "4, so scaling = alpha / rank = 2"}
NOTES = "B starts at zero, so the output is unchanged and A has no gradient in the first step. Trains A, B and magnitude. The bias is added after scaling. rank divides."


class DoRA(nn.Module):
    def __init__(self, linear, rank=2, alpha=4):
        super().__init__()
        self.register_buffer("weight", linear.weight.detach().clone())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())
        self.scale = alpha / rank
        self.A = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features ** 0.5)
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.magnitude = nn.Parameter(self.weight.norm(dim=1))

    def forward(self, x):
        w = self.weight + self.scale * self.B @ self.A
        norm = w.norm(dim=1).detach()
        return F.linear(x, w) * (self.magnitude / norm) + (0 if self.bias is None else self.bias)


def make(seed):
    torch.manual_seed(seed)
    return {"linear": nn.Linear(8, 6), "x": torch.randn(5, 8)}


def right(linear, rank=2, alpha=4):
    return DoRA(linear, rank, alpha)


if __name__ == "__main__":
    d = make(0)
    m = right(d["linear"])
    gap = float((m(d["x"]) - d["linear"](d["x"])).detach().abs().max())
    opt = torch.optim.SGD(m.parameters(), lr=0.1)
    for _ in range(2):
        opt.zero_grad()
        loss = (m(d["x"]) - 1).square().mean()
        loss.backward()
        opt.step()
    w = m.weight + 2 * m.B @ m.A
    slow = torch.stack([m.magnitude[o] * (d["x"] @ w[o]) / w[o].square().sum().sqrt() + m.bias[o] for o in range(6)], 1)
    gap2 = float((slow - m(d["x"])).detach().abs().max())
    assert gap < 1e-5 and gap2 < 1e-5 and all(p.grad.norm() > 0 for p in m.parameters())
    print("ok", gap, gap2, float(loss.detach()))
