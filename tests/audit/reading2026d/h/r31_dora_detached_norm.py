"""DoRA: weight = magnitude * (W + BA)/||W + BA|| per output row with the norm DETACHED (paper section 4.3), so the gradient is not that of the written formula; B is zero, hence the wrapper equals the base at the start and A has no gradient at step one."""
FAMILY = "adapter"; KIND = "adapter"
INPUTS = {"base": "nn.Linear, frozen", "x": "[rows, in]"}
SETTINGS = {"rank": "3", "alpha": "6, scale alpha/rank"}
NOTES = "right(base) returns the module. Trainable: A, B, magnitude. Base weight and bias frozen. Detaching the norm is the paper's memory saving."
import torch, torch.nn as nn, torch.nn.functional as F
class DoRA(nn.Module):
    def __init__(self, base, rank=3, alpha=6.0):
        super().__init__(); self.base = base.requires_grad_(False); self.s = alpha / rank
        self.A = nn.Parameter(torch.randn(rank, base.in_features, dtype=base.weight.dtype) * 0.1); self.B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=base.weight.dtype))
        self.magnitude = nn.Parameter(base.weight.detach().norm(dim=1).clone())
    def forward(self, x):
        v = self.base.weight + self.s * self.B @ self.A
        return F.linear(x, v * (self.magnitude / v.detach().norm(dim=1)).unsqueeze(1), self.base.bias)
def make(seed): torch.manual_seed(seed); return {"base": nn.Linear(6, 5).double(), "x": torch.randn(7, 6).double()}
def right(base, rank=3, alpha=6.0): return DoRA(base, rank, alpha)
if __name__ == "__main__":
    d = make(0); want = d["base"](d["x"]).detach(); m = right(d["base"]); assert torch.allclose(m(d["x"]), want)
    o = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1); l = []
    for i in range(30):
        o.zero_grad(); loss = (m(d["x"]) - 2 * want).square().mean(); loss.backward(); l.append(loss.item())
        if i == 0: print("grad A", m.A.grad.norm().item(), "B", m.B.grad.norm().item(), "mag", m.magnitude.grad.norm().item())
        o.step()
    print(l[0], "->", l[-1]); assert l[-1] < l[0] and m.base.weight.grad is None
