"""(IA)^3 (Liu et al. 2022). The only trained parameter is a vector of ONES that scales the input of the second feed-forward layer; weight decay must not be applied to it, as the neutral value is one. It merges into the columns of the weight."""
FAMILY = "adapters"
KIND = "adapter"
INPUTS = {"base": "frozen linear layer", "x": "[rows, in]"}
SETTINGS = {}
NOTES = "Trained: in_features numbers, starting at one. Bias unscaled. Merged weight: W * l[None, :]."
import torch
import torch.nn as nn


class Ia3(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.l = nn.Parameter(torch.ones(base.in_features))

    def forward(self, x):
        return self.base(x * self.l)


def make(seed):
    torch.manual_seed(seed)
    return {"base": nn.Linear(12, 10), "x": torch.randn(5, 12)}


def right(base):
    return Ia3(base)


if __name__ == "__main__":
    b = make(0); m = right(b["base"])
    assert torch.equal(m(b["x"]), b["base"](b["x"]))
    m(b["x"]).square().mean().backward()
    with torch.no_grad():
        m.l -= 0.1 * m.l.grad
    assert m.l.grad.norm() > 0 and torch.allclose(m(b["x"]), b["x"] @ (m.base.weight * m.l).t() + m.base.bias, atol=1e-6)
    print("grad", m.l.grad.norm().item())
