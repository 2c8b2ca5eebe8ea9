"""ZeRO-1: AdamW on flat, padded shards that cut through the middle of parameters.
Each rank owns ceil(N/world) entries of the one flat vector, zero padded at the end; the clip norm is the root of the summed squares of the shards (Rajbhandari et al. 2020). The padding has zero gradient and weight, so it stays zero."""
FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "small net, float64", "optimizer": "list over ranks of dict m, v (flat shards), t; mutated",
          "batches": "list over ranks of dict x [rows,6], y [rows] ; equal rows per rank"}
SETTINGS = {"lr": "0.01", "wd": "decoupled weight decay on every entry, 0.1", "max_norm": "global clip norm, 0.5"}
NOTES = "One step per call. Mean over the rows of a rank, then mean over ranks (ranks need equal rows for this to be the global mean). Works for a parameter count that world does not divide. Equal to AdamW unsharded. Biases are decayed too, on purpose, since the flat vector does not know them."
import torch, torch.nn as nn, copy

def make(seed, world=5):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    n = sum(p.numel() for p in model.parameters()); k = -(-n // world)
    opt = [{"m": torch.zeros(k).double(), "v": torch.zeros(k).double(), "t": 0} for _ in range(world)]
    return {"model": model, "optimizer": opt, "batches": [{"x": torch.randn(4, 6).double(), "y": torch.randn(4).double()} for _ in range(world)]}

def right(model, optimizer, batches, lr=0.01, wd=0.1, max_norm=0.5):
    world = len(batches); params = list(model.parameters())
    n = sum(p.numel() for p in params); k = -(-n // world)
    pad = lambda v: torch.cat([v, v.new_zeros(k * world - n)])
    reduced = torch.zeros(k * world, dtype=params[0].dtype)
    for b in batches:                                                    # reduce-scatter of averages
        gr = torch.autograd.grad(((model(b["x"]).squeeze(-1) - b["y"]) ** 2).mean(), params)
        reduced += pad(torch.cat([g.flatten() for g in gr])) / world
    gshards = list(reduced.split(k))
    norm = torch.stack([g.square().sum() for g in gshards]).sum().sqrt()  # all-reduce of the squares
    coef = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    wshards = list(pad(torch.cat([p.detach().flatten() for p in params])).split(k))
    for r in range(world):
        st, g, w = optimizer[r], gshards[r] * coef, wshards[r].clone()
        st["t"] += 1
        st["m"].mul_(0.9).add_(g, alpha=0.1); st["v"].mul_(0.999).addcmul_(g, g, value=0.001)
        w.mul_(1 - lr * wd)
        w.sub_(lr * (st["m"] / (1 - 0.9 ** st["t"])) / ((st["v"] / (1 - 0.999 ** st["t"])).sqrt() + 1e-8))
        wshards[r] = w
    full = torch.cat(wshards)[:n]; at = 0                                 # all-gather
    with torch.no_grad():
        for p in params:
            p.copy_(full[at:at + p.numel()].view_as(p)); at += p.numel()

if __name__ == "__main__":
    d = make(0); m2 = copy.deepcopy(d["model"]); o = torch.optim.AdamW(m2.parameters(), lr=0.01, weight_decay=0.1)
    n = sum(p.numel() for p in m2.parameters()); print("params", n, "world 5, remainder", n % 5)
    for _ in range(4):
        right(**d); o.zero_grad()
        x = torch.cat([b["x"] for b in d["batches"]]); y = torch.cat([b["y"] for b in d["batches"]])
        ((m2(x).squeeze(-1) - y) ** 2).mean().backward(); nn.utils.clip_grad_norm_(m2.parameters(), 0.5); o.step()
    err = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), m2.parameters()))
    print("err", err); assert err < 1e-10
