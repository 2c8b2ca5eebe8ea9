"""DoRA (Liu et al. 2024): weight = m * (W + sBA) / ||W + sBA|| per output row, with the norm DETACHED in the forward (paper section 4.3, PEFT), so the gradient is deliberately not that of the written function.
Dropout-free form as in PEFT: the base output is reused and only (m/norm - 1) * base + (m/norm) * lora is added; at start the wrapper is exactly the base layer, and A has zero gradient as B is 0."""
import torch, torch.nn as nn, torch.nn.functional as F
FAMILY = "adapters and merged weights"
KIND = "adapter"
INPUTS = {"base": "nn.Linear with bias, frozen by the wrapper", "x": "inputs [rows, time, in]", "y": "targets for a test loss, [rows, time, out]"}
SETTINGS = {"r": "rank, 4", "alpha": "LoRA alpha, 8"}
NOTES = ("right(base, r, alpha) returns a module. Trained: A, B, m (magnitude per output row, starts at the row norm of W). Frozen: weight and bias. The norm is a constant in backward, so finite differences of A and B do not agree with autograd; m's do. "
         "The bias is outside of the scaling. merge() gives a plain nn.Linear with the same function. On the first step B gets a gradient and A none (B = 0).")

class DoRA(nn.Module):
    def __init__(self, base, r, alpha):
        super().__init__()
        self.base = base.requires_grad_(False); self.s = alpha / r
        self.A = nn.Parameter(torch.empty(r, base.in_features)); nn.init.kaiming_uniform_(self.A, a=5 ** 0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, r)); self.m = nn.Parameter(base.weight.norm(dim=1).detach().clone())
    def forward(self, x):
        out = F.linear(x, self.base.weight)
        norm = (self.base.weight + self.s * self.B @ self.A).norm(dim=1).detach()
        k = self.m / norm
        out = out + (k - 1) * out + k * self.s * F.linear(F.linear(x, self.A), self.B)
        return out if self.base.bias is None else out + self.base.bias
    @torch.no_grad()
    def merge(self):
        W = self.base.weight + self.s * self.B @ self.A
        lin = nn.Linear(self.base.in_features, self.base.out_features, bias=self.base.bias is not None)
        lin.weight.copy_(W * (self.m / W.norm(dim=1))[:, None])
        if lin.bias is not None: lin.bias.copy_(self.base.bias)
        return lin

def make(seed):
    torch.manual_seed(seed); return {"base": nn.Linear(12, 10), "x": torch.randn(3, 5, 12), "y": torch.randn(3, 5, 10)}

def right(base, r=4, alpha=8):
    return DoRA(base, r, alpha)

if __name__ == "__main__":
    D = make(0); x, y = D["x"], D["y"]; ref = D["base"](x).detach(); a = right(D["base"])
    e0 = (a(x) - ref).abs().max().item(); F.mse_loss(a(x), y).backward(); print("at start", e0, "grad A", a.A.grad.norm().item(), "B", a.B.grad.norm().item(), "m", a.m.grad.norm().item()); assert e0 < 1e-6 and a.A.grad.norm() == 0 and a.B.grad.norm() > 0
    opt = torch.optim.Adam([p for p in a.parameters() if p.requires_grad], lr=0.02); l0 = F.mse_loss(a(x), y).item()
    for _ in range(50): opt.zero_grad(); l = F.mse_loss(a(x), y); l.backward(); opt.step()
    e1 = (a.merge()(x) - a(x)).abs().max().item()
    A, B, m = (p.detach().clone().requires_grad_(True) for p in (a.A, a.B, a.m)); W = a.base.weight + 2 * B @ A; c = W.detach().norm(dim=1, keepdim=True)
    out = torch.stack([torch.stack([m * (W @ x[i, t]) / c[:, 0] + a.base.bias for t in range(5)]) for i in range(3)]); F.mse_loss(out, y).backward(); opt.zero_grad(); F.mse_loss(a(x), y).backward()
    e2 = max((p.grad - q.grad).abs().max().item() for p, q in ((A, a.A), (B, a.B), (m, a.m)))
    print("loss", l0, "->", l.item(), "merged", e1, "gradient vs explicit loop", e2, "base grad", a.base.weight.grad); assert e1 < 1e-5 and e2 < 1e-6 and l.item() < l0 and a.A.grad.norm() > 0
