"""Rotary table filled lazily. The cache is absent from the state dict (persistent=False), is rebuilt in float32 even inside a half-precision model, grows by doubling when a longer row comes, and is never
shrunk. A checkpoint without it loads strictly, and results do not depend on which lengths were seen before."""
FAMILY = "state"
KIND = "state"
INPUTS = {"q": "queries, [rows, heads, time, 8]", "positions": "positions, not always 0.., [rows, time]"}
SETTINGS = {"base": "rotary base, 10000.0", "dim": "width of a head, 8, must be even"}
NOTES = ("right(dim, base) makes the module; forward(q, positions) rotates q in the half-split (GPT-NeoX) convention and keeps its dtype. The module has an empty state dict. The cache is a pure function of dim and base.")
import torch
import torch.nn as nn


class Rotary(nn.Module):
    def __init__(self, dim, base):
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("table", torch.zeros(0, dim), persistent=False)

    def grow(self, length, device):
        if length <= len(self.table) and self.table.dtype == torch.float32 and self.table.device == device:
            return
        size = 16
        while size < length:
            size *= 2
        size = max(size, len(self.table))
        inv = self.base ** (-torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim)
        angle = torch.arange(size, dtype=torch.float32, device=device)[:, None] * inv
        self.table = torch.cat([angle.cos(), angle.sin()], -1)

    def forward(self, q, positions):
        self.grow(int(positions.max()) + 1, q.device)
        cos, sin = self.table[positions][:, None].chunk(2, -1)
        a, b = q.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(q.dtype)


def make(seed):
    torch.manual_seed(seed)
    return {"q": torch.randn(2, 3, 5, 8), "positions": torch.randint(0, 40, (2, 5))}


def right(dim=8, base=10000.0):
    return Rotary(dim, base)


if __name__ == "__main__":
    import math
    d = make(0)
    m = right()
    short = m(d["q"], torch.arange(5).expand(2, 5))
    out = m(d["q"], d["positions"])
    assert torch.equal(m(d["q"], torch.arange(5).expand(2, 5)), short)          # growing changed nothing
    worst = 0.0
    for r in range(2):
        for h in range(3):
            for t in range(5):
                for i in range(4):
                    w = int(d["positions"][r, t]) * 10000.0 ** (-2 * i / 8)
                    a, b = float(d["q"][r, h, t, i]), float(d["q"][r, h, t, i + 4])
                    worst = max(worst, abs(float(out[r, h, t, i]) - (a * math.cos(w) - b * math.sin(w))), abs(float(out[r, h, t, i + 4]) - (b * math.cos(w) + a * math.sin(w))))
    assert m.state_dict() == {} and worst < 1e-4
    half = right().to(torch.bfloat16)
    assert half(d["q"].bfloat16(), d["positions"]).dtype == torch.bfloat16 and half.table.dtype == torch.float32
    m.to(torch.bfloat16)                                                      # a cast of the filled cache is repaired
    assert torch.equal(m(d["q"], d["positions"]), out)
    print("largest difference to the formula %.1e, table of %d positions" % (worst, len(m.table)))
