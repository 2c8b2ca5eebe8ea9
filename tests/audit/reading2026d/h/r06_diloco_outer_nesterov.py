"""DiLoCo: the 'gradient' of the outer optimizer is old weights minus new weights, averaged over workers.
Workers run several inner AdamW steps from the same point with inner states of their own that are kept over rounds and never averaged; the outer step is SGD with Nesterov momentum at lr 0.7 (Douillard et al. 2023)."""
FAMILY = "update local"
KIND = "update"
INPUTS = {"model": "small net float64 (global weights)", "optimizer": "outer SGD Nesterov over model", "batches": "list over workers of lists of dict x, y; one inner step each",
          "inner": "dict: worker -> state dict of its inner AdamW, mutated; empty at the start"}
SETTINGS = {"inner_lr": "0.01"}
NOTES = "One outer step per call. No gradient averaging between workers inside a round. Result does not equal synchronous training. Worker order is irrelevant if inner states follow."
import torch, torch.nn as nn, copy

def make(seed):
    torch.manual_seed(seed); m = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=0.7, momentum=0.9, nesterov=True),
            "batches": [[{"x": torch.randn(4, 6).double(), "y": torch.randn(4).double()} for _ in range(3)] for _ in range(2)], "inner": {}}

def right(model, optimizer, batches, inner=None, inner_lr=0.01):
    inner = {} if inner is None else inner
    optimizer.zero_grad(set_to_none=True)
    for p in model.parameters(): p.grad = torch.zeros_like(p)
    for r, steps in enumerate(batches):
        worker = copy.deepcopy(model)
        opt = torch.optim.AdamW(worker.parameters(), lr=inner_lr)
        if r in inner: opt.load_state_dict(inner[r])
        for b in steps:
            opt.zero_grad(set_to_none=True)
            ((worker(b["x"]).squeeze(-1) - b["y"]) ** 2).mean().backward()
            opt.step()
        inner[r] = copy.deepcopy(opt.state_dict())
        for p, q in zip(model.parameters(), worker.parameters()):
            p.grad.add_((p.detach() - q.detach()) / len(batches))
    optimizer.step(); optimizer.zero_grad(set_to_none=True)

if __name__ == "__main__":
    d = make(0); L = lambda m: sum(((m(b["x"]).squeeze(-1) - b["y"]) ** 2).mean().item() for w in d["batches"] for b in w) / 6
    l0 = L(d["model"])
    # explicit twin with hand-written Nesterov
    tw = copy.deepcopy(d["model"]); bufs = None; workers_opt = {}
    for rnd in range(3):
        right(**d)
        deltas = []
        for r, steps in enumerate(d["batches"]):
            w = copy.deepcopy(tw); o = torch.optim.AdamW(w.parameters(), lr=0.01)
            if r in workers_opt: o.load_state_dict(workers_opt[r])
            for b in steps:
                o.zero_grad(); ((w(b["x"]).squeeze(-1) - b["y"]) ** 2).mean().backward(); o.step()
            workers_opt[r] = o.state_dict(); deltas.append([p.detach() - q.detach() for p, q in zip(tw.parameters(), w.parameters())])
        g = [(a + b) / 2 for a, b in zip(*deltas)]
        bufs = [x.clone() for x in g] if bufs is None else [0.9 * m + x for m, x in zip(bufs, g)]
        with torch.no_grad():
            for p, x, m in zip(tw.parameters(), g, bufs): p -= 0.7 * (x + 0.9 * m)
    err = max((a - b).abs().max().item() for a, b in zip(tw.parameters(), d["model"].parameters()))
    print("loss", l0, "->", L(d["model"]), "err", err); assert err < 1e-12 and L(d["model"]) < l0
