"""VeRA (Kopiczko et al. 2023). The low-rank matrices are frozen RANDOM, shared by all layers, drawn from a seed and not saved (non-persistent buffers); only two vectors are trained, one starting at zero."""
FAMILY = "adapters"
KIND = "adapter"
INPUTS = {"base": "frozen linear layer", "x": "[rows, in]"}
SETTINGS = {"r": "rank, 16 (may exceed usual ranks)", "proj_seed": "seed of the shared projections, 77", "d_init": "start of the vector d, 0.1"}
NOTES = "state_dict holds d, b and the base only; the projections come again from proj_seed, with their own generator so that the global random state is untouched."
import torch
import torch.nn as nn


class Vera(nn.Module):
    def __init__(self, base, r, proj_seed, d_init):
        super().__init__()
        self.base = base.requires_grad_(False)
        gen = torch.Generator().manual_seed(proj_seed)
        self.register_buffer("A", torch.randn(r, base.in_features, generator=gen) / base.in_features ** 0.5, persistent=False)
        self.register_buffer("B", torch.randn(base.out_features, r, generator=gen) / r ** 0.5, persistent=False)
        self.d = nn.Parameter(torch.full((r,), d_init))
        self.b = nn.Parameter(torch.zeros(base.out_features))

    def forward(self, x):
        return self.base(x) + self.b * (((x @ self.A.t()) * self.d) @ self.B.t())


def make(seed):
    torch.manual_seed(seed)
    return {"base": nn.Linear(12, 10), "x": torch.randn(5, 12)}


def right(base, r=16, proj_seed=77, d_init=0.1):
    return Vera(base, r, proj_seed, d_init)


if __name__ == "__main__":
    b = make(0); m = right(b["base"])
    opt = torch.optim.SGD([m.d, m.b], 0.1)
    for _ in range(3):
        opt.zero_grad(); m(b["x"]).square().mean().backward(); opt.step()
    other = right(nn.Linear(12, 10)); other.load_state_dict(m.state_dict())
    w = m.base.weight + torch.diag(m.b) @ m.B @ torch.diag(m.d) @ m.A
    assert sorted(m.state_dict()) == ["b", "base.bias", "base.weight", "d"] and torch.equal(other(b["x"]), m(b["x"]))
    assert torch.allclose(m(b["x"]), b["x"] @ w.t() + m.base.bias, atol=1e-5) and m.d.grad.norm() > 0 and m.b.grad.norm() > 0
    print("restored without saved projections; grads", m.d.grad.norm().item(), m.b.grad.norm().item())
