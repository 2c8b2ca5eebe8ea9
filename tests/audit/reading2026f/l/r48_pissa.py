"""PiSSA. The adapter starts with the principal singular vectors, so NEITHER factor is zero, and the frozen base weight is CHANGED at wrapping: it becomes the residual W - BA. Start output is the same up to rounding; to ship the result
beside the original base, the update B A - B0 A0 is exported as a LoRA of twice the rank."""
FAMILY = "adapters"
KIND = "adapter"
INPUTS = {"base": "nn.Linear to wrap (weight is replaced by the residual and frozen)", "x": "inputs, [rows, 6]"}
SETTINGS = {"rank": "rank of the adapter, 2, at most the smaller side of the weight"}
NOTES = ("Trained: A and B, both with gradient from the first step; frozen: residual weight and bias. No alpha (scale 1). A0 and B0 are buffers in the state dict, needed for export_lora(). "
         "The wrapped nn.Linear must not be shared with another module, since its weight is changed in place.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class PiSSA(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base
        for p in base.parameters():
            p.requires_grad_(False)
        u, s, vh = torch.linalg.svd(base.weight.detach().double(), full_matrices=False)
        root = s[:rank].sqrt()
        self.B = nn.Parameter((u[:, :rank] * root).float())
        self.A = nn.Parameter((root[:, None] * vh[:rank]).float())
        self.register_buffer("B0", self.B.detach().clone())
        self.register_buffer("A0", self.A.detach().clone())
        base.weight.data.sub_(self.B0 @ self.A0)

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.A), self.B)

    @torch.no_grad()
    def export_lora(self):
        return torch.cat([self.A, self.A0]), torch.cat([self.B, -self.B0], 1)


def make(seed):
    torch.manual_seed(seed)
    return {"base": nn.Linear(6, 5), "x": torch.randn(7, 6)}


def right(base, rank=2):
    return PiSSA(base, rank)


if __name__ == "__main__":
    d = make(0)
    W, b = d["base"].weight.detach().clone(), d["base"].bias.detach().clone()
    plain = F.linear(d["x"], W, b)
    m = right(d["base"])
    print("start difference %.1e, residual norm %.3f of %.3f" % (float((m(d["x"]) - plain).abs().max()), float(m.base.weight.norm()), float(W.norm())))
    assert torch.allclose(m(d["x"]), plain, atol=1e-5)
    s = torch.linalg.svdvals(W)
    assert abs(float(m.base.weight.norm()) - float(s[2:].norm())) < 1e-4        # the best residual of rank 2
    opt = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
    y = torch.randn(7, 5)
    losses = []
    for k in range(30):
        opt.zero_grad()
        loss = (m(d["x"]) - y).pow(2).mean()
        loss.backward()
        assert float(m.A.grad.abs().max()) > 0 and float(m.B.grad.abs().max()) > 0
        losses.append(loss.item())
        opt.step()
    A, B = m.export_lora()
    assert A.shape == (4, 6) and torch.allclose(F.linear(d["x"], W + B @ A, b), m(d["x"]), atol=1e-5)
    print("loss %.4f -> %.4f" % (losses[0], losses[-1]))
    assert losses[-1] < losses[0]
