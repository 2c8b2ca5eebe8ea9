"""ZeRO-1 Adam whose state can be loaded with another number of ranks (DeepSpeed universal checkpoint). All parameters are one flat padded vector cut at places that ignore tensor borders; loading joins the shards, strips the padding of the old world and pads anew."""
import torch
from torch import nn
FAMILY = "sharding"
KIND = "state"
INPUTS = {"model": "any module", "world": "ranks, any number >= 1"}
SETTINGS = {"lr": "0.01", "betas": "0.9, 0.99", "eps": "1e-8"}
NOTES = "right(model, world) gives the optimizer; state_dict() is one dict per rank (copies). Equal to torch.optim.Adam without weight decay. Padding entries have gradient 0 and never reach a parameter."
class ZeroAdam:
    def __init__(self, model, world, lr=0.01, betas=(0.9, 0.99), eps=1e-8):
        self.params, self.world, self.lr, self.betas, self.eps = list(model.parameters()), world, lr, betas, eps
        self.n = sum(p.numel() for p in self.params); self.t = 0
        self.m, self.v = self.cut(torch.zeros(self.n)), self.cut(torch.zeros(self.n))
    def cut(self, flat):
        return [c.clone() for c in nn.functional.pad(flat, (0, -self.n % self.world)).chunk(self.world)]
    @torch.no_grad()
    def step(self):
        self.t += 1; b1, b2 = self.betas
        ps = self.cut(torch.cat([p.flatten() for p in self.params])); gs = self.cut(torch.cat([p.grad.flatten() for p in self.params]))
        for r in range(self.world):
            self.m[r].mul_(b1).add_(gs[r], alpha=1 - b1); self.v[r].mul_(b2).addcmul_(gs[r], gs[r], value=1 - b2)
            ps[r] -= self.lr * (self.m[r] / (1 - b1 ** self.t)) / ((self.v[r] / (1 - b2 ** self.t)).sqrt() + self.eps)
        flat, at = torch.cat(ps)[:self.n], 0                                    # all-gather
        for p in self.params:
            p.copy_(flat[at:at + p.numel()].view_as(p)); at += p.numel()
    def state_dict(self):
        return [{"t": self.t, "n": self.n, "m": self.m[r].clone(), "v": self.v[r].clone()} for r in range(self.world)]
    def load_state_dict(self, shards):
        assert shards[0]["n"] == self.n
        self.t = shards[0]["t"]
        self.m, self.v = (self.cut(torch.cat([s[k] for s in shards])[:self.n]) for k in ("m", "v"))

def make(seed):
    torch.manual_seed(seed)
    return {"model": nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), "world": 4}

def right(model, world):
    return ZeroAdam(model, world)

if __name__ == "__main__":
    import copy
    d = make(0); a = d["model"]; b = copy.deepcopy(a); z = right(a, 4); o = torch.optim.Adam(b.parameters(), lr=.01, betas=(.9, .99))
    for i in range(12):
        if i in (4, 8):
            s = z.state_dict(); z = right(a, 3 if i == 4 else 5); z.load_state_dict(s)
        x = torch.randn(8, 5)
        for m in (a, b):
            m.zero_grad(); m(x).square().mean().backward()
        z.step(); o.step()
    e = max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters())); print("n", z.n, "error", e); assert e < 1e-5
