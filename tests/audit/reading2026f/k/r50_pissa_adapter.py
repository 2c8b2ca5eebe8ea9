"""PiSSA adapter (Meng et al. 2024; peft init_lora_weights='pissa'). Neither A nor B starts at zero: they hold the top singular directions of W, and the FROZEN base weight is changed
to the residual W - s B A, so the function at the start is the original. Saving as plain LoRA needs twice the rank (new minus initial)."""
import torch, torch.nn as nn, torch.nn.functional as F

FAMILY = "adapters"
KIND = "adapter"
INPUTS = {"linear": "nn.Linear to wrap (is not modified; the wrapper holds a residual copy)", "rank": "4"}
SETTINGS = {"rank": "4", "alpha": "8, the scale is alpha / rank"}
NOTES = "Only A and B are trained; residual weight and bias are buffers. merged() gives the full weight. to_lora() gives (A, B) of rank 2r that, with the same scale, turn the ORIGINAL weight into the trained one."


def make(seed):
    torch.manual_seed(seed)
    return {"linear": nn.Linear(10, 7), "rank": 4}


class right(nn.Module):
    def __init__(self, linear, rank=4, alpha=8.0):
        super().__init__()
        self.scale = alpha / rank
        w = linear.weight.detach()
        u, s, vh = torch.linalg.svd(w.float(), full_matrices=False)
        root = (s[:rank] / self.scale).sqrt()
        self.A, self.B = nn.Parameter(root[:, None] * vh[:rank]), nn.Parameter(u[:, :rank] * root)
        self.register_buffer("weight", w - self.scale * (self.B @ self.A).detach())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())
        self.register_buffer("A0", self.A.detach().clone()); self.register_buffer("B0", self.B.detach().clone())

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(F.linear(x, self.A), self.B)

    def merged(self):
        return self.weight + self.scale * (self.B @ self.A)

    def to_lora(self):
        return torch.cat([self.A, self.A0]).detach(), torch.cat([self.B, -self.B0], 1).detach()


if __name__ == "__main__":
    d = make(0); lin = d["linear"]; w0 = lin.weight.detach().clone(); mod = right(**d); x = torch.randn(5, 10)
    print("at the start", (mod(x) - lin(x)).abs().max().item(), "residual differs from W by", (mod.weight - w0).norm().item())
    assert torch.allclose(mod(x), lin(x), atol=1e-5) and torch.equal(lin.weight, w0) and [n for n, _ in mod.named_parameters()] == ["A", "B"]
    assert abs(torch.linalg.matrix_norm(mod.weight, 2).item() - torch.linalg.svdvals(w0)[4].item()) < 1e-5
    opt = torch.optim.SGD(mod.parameters(), lr=0.1)
    for _ in range(5):
        opt.zero_grad(); mod(x).square().mean().backward(); opt.step()
    A, B = mod.to_lora()
    print("trained moved by", (mod.merged() - w0).norm().item()); assert (mod.merged() - w0).norm() > 1e-3
    assert torch.allclose(F.linear(x, mod.merged(), mod.bias), mod(x), atol=1e-5) and torch.allclose(w0 + mod.scale * B @ A, mod.merged(), atol=1e-5)
