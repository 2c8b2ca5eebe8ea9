"""PiSSA adapter: A and B hold the PRINCIPAL singular directions of the weight, and the frozen base becomes the residual W - BA, so the base weight is changed at wrapping and B is not zero at the start; yet the output is unchanged (Meng et al. 2024; peft init_lora_weights='pissa')."""
import torch
import torch.nn as nn

FAMILY = "adapters"
KIND = "adapter"
INPUTS = {"linear": "nn.Linear to be wrapped", "x": "input, [rows, in]"}
SETTINGS = {"rank": "3"}
NOTES = "Scaling is 1 (alpha = rank). Trains A and B only. merge() gives a plain linear. The saved adapter is only valid with the residual base (or after conversion to LoRA by BA - B0A0). Computed in float32."


class PiSSA(nn.Module):
    def __init__(self, linear, rank=3):
        super().__init__()
        u, s, vt = torch.linalg.svd(linear.weight.detach().float(), full_matrices=False)
        root = s[:rank].sqrt()
        self.B = nn.Parameter(u[:, :rank] * root)
        self.A = nn.Parameter(root[:, None] * vt[:rank])
        self.base = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
        with torch.no_grad():
            self.base.weight.copy_(linear.weight - self.B @ self.A)
            if linear.bias is not None:
                self.base.bias.copy_(linear.bias)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + x @ self.A.T @ self.B.T

    @torch.no_grad()
    def merge(self):
        out = nn.Linear(self.base.in_features, self.base.out_features, bias=self.base.bias is not None)
        out.weight.copy_(self.base.weight + self.B @ self.A)
        if self.base.bias is not None:
            out.bias.copy_(self.base.bias)
        return out


def make(seed):
    torch.manual_seed(seed)
    return {"linear": nn.Linear(8, 6), "x": torch.randn(5, 8)}


def right(linear, rank=3):
    return PiSSA(linear, rank)


if __name__ == "__main__":
    d = make(0)
    m = right(d["linear"])
    gap = float((m(d["x"]) - d["linear"](d["x"])).detach().abs().max())
    opt = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
    m(d["x"]).square().mean().backward()
    ga, gb = float(m.A.grad.norm()), float(m.B.grad.norm())
    opt.step()
    gap2 = float((m(d["x"]) - m.merge()(d["x"])).detach().abs().max())
    assert gap < 1e-5 and gap2 < 1e-5 and ga > 0 and gb > 0 and m.base.weight.grad is None
    print("ok", gap, gap2, ga, gb)
