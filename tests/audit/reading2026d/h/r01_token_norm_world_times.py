"""Token-normalised accumulation that multiplies by the world size.
Every micro-batch loss is a SUM over its tokens divided by the trained-token count of the whole step (all ranks, all micro-batches), then times world size, since data-parallel averaging divides by it again (HF Trainer num_items_in_batch * num_processes). No division by the number of accumulation steps is wanted."""
FAMILY = "update with accumulation"
KIND = "update"
INPUTS = {"model": "classifier over vectors, float64", "optimizer": "SGD over model",
          "batches": "list over ranks of lists over micro-batches of dict x [rows,time,8], y [rows,time] with -100 where not trained"}
SETTINGS = {"max_norm": "gradient clipping norm after the averaging, 1.0"}
NOTES = "One optimizer step per call, equal to the step on the token mean over all ranks and micro-batches. Ranks may have different numbers of micro-batches and tokens. Gradients of ranks are averaged (sum / world). Ranks are simulated in one process. Needs at least one trained token in all."
import torch, torch.nn as nn, torch.nn.functional as F, copy

def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    def mb(rows, time):
        y = torch.randint(0, 5, (rows, time), generator=g)
        y[torch.rand(rows, time, generator=g) < 0.4] = -100
        y[0, 0] = 1
        return {"x": torch.randn(rows, time, 8, generator=g).double(), "y": y}
    batches = [[mb(2, 6), mb(3, 4)], [mb(1, 9), mb(4, 2), mb(2, 3)]]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "batches": batches}

def right(model, optimizer, batches, max_norm=1.0):
    world = len(batches)
    total = sum(int((b["y"] != -100).sum()) for rank in batches for b in rank)      # all-reduced count
    mean = [torch.zeros_like(p) for p in model.parameters()]
    for rank in batches:
        optimizer.zero_grad(set_to_none=True)
        for b in rank:
            logits = model(b["x"])
            s = F.cross_entropy(logits.flatten(0, 1), b["y"].flatten(), ignore_index=-100, reduction="sum")
            (s / total * world).backward()
        for m, p in zip(mean, model.parameters()):
            m.add_(p.grad / world)                                                     # what DDP does
    for m, p in zip(mean, model.parameters()):
        p.grad = m
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

if __name__ == "__main__":
    d = make(0); twin = copy.deepcopy(d["model"]); opt = torch.optim.SGD(twin.parameters(), lr=0.1)
    tot, n = 0.0, 0
    for rank in d["batches"]:
        for b in rank:
            for i in range(b["x"].shape[0]):
                for t in range(b["x"].shape[1]):
                    if b["y"][i, t] != -100:
                        tot = tot - torch.log_softmax(twin(b["x"][i, t]), -1)[b["y"][i, t]]; n += 1
    (tot / n).backward(); nn.utils.clip_grad_norm_(twin.parameters(), 1.0); opt.step()
    before = [p.clone() for p in d["model"].parameters()]
    right(d["model"], d["optimizer"], d["batches"])
    err = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), twin.parameters()))
    mv = max((a - b).abs().max().item() for a, b in zip(d["model"].parameters(), before))
    print("err", err, "moved", mv); assert err < 1e-12 and mv > 1e-4
