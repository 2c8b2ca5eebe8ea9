"""DoRA. The adapted weight is split into direction and a trained magnitude per output row; the norm it is divided by is DETACHED (section 4.3 of the paper, and in peft), so the backward is not that of the written formula. B starts
at zero, hence the wrapped layer begins exactly as the base."""
FAMILY = "adapters"
KIND = "adapter"
INPUTS = {"base": "nn.Linear to wrap (its parameters are frozen)", "x": "inputs, [rows, 6]"}
SETTINGS = {"rank": "rank of the update, 2", "alpha": "scale numerator, 4.0 (scale is alpha / rank)"}
NOTES = ("Trained: A, B and magnitude; frozen: base weight and bias. Output equals the base before training; magnitude and B have a gradient at the start, A has exactly none until B moves. The norm is over the input axis and a constant for the gradient. "
         "merge() returns a plain nn.Linear with the same output.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class DoRA(nn.Module):
    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base = base
        for p in base.parameters():
            p.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features ** 0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.magnitude = nn.Parameter(base.weight.detach().norm(dim=1))
        self.scale = alpha / rank

    def weight(self):
        v = self.base.weight + self.scale * self.B @ self.A
        return (self.magnitude / v.norm(dim=1).detach())[:, None] * v

    def forward(self, x):
        return F.linear(x, self.weight(), self.base.bias)

    @torch.no_grad()
    def merge(self):
        out = nn.Linear(self.base.in_features, self.base.out_features, bias=self.base.bias is not None)
        out.weight.copy_(self.weight())
        if self.base.bias is not None:
            out.bias.copy_(self.base.bias)
        return out


def make(seed):
    torch.manual_seed(seed)
    return {"base": nn.Linear(6, 5), "x": torch.randn(7, 6)}


def right(base, rank=2, alpha=4.0):
    return DoRA(base, rank, alpha)


if __name__ == "__main__":
    d = make(0)
    plain = d["base"](d["x"]).detach()
    m = right(d["base"])
    print("difference at the start %.1e" % float((m(d["x"]) - plain).abs().max()))
    assert torch.allclose(m(d["x"]), plain, atol=1e-5)
    opt = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
    y = torch.randn(7, 5)
    losses = []
    for k in range(60):
        opt.zero_grad()
        loss = (m(d["x"]) - y).pow(2).mean()
        loss.backward()
        if k == 0:
            assert float(m.A.grad.abs().max()) == 0 and float(m.B.grad.abs().max()) > 0 and float(m.magnitude.grad.abs().max()) > 0
        losses.append(loss.item())
        opt.step()
    assert m.base.weight.grad is None and torch.allclose(m.merge()(d["x"]), m(d["x"]), atol=1e-5)
    assert torch.allclose(m.weight().norm(dim=1), m.magnitude.abs(), atol=1e-5)
    print("loss %.4f -> %.4f" % (losses[0], losses[-1]))
    assert losses[-1] < losses[0]
