"""ZeRO-1 with flat shards that cut through parameters. DeepSpeed ZeRO-1, Megatron distributed optimizer, FSDP1 FlatParameter (use_orig_params).
All gradients are concatenated in one flat vector, padded to a multiple of the number of ranks, averaged and scattered; each rank holds the Adam state of its slice only, updates it,
and the slices are gathered again. Slice borders lie in the middle of parameters and the pad has weights and moments too. AdamW is elementwise, so the result is that of one process."""
import torch
import torch.nn.functional as F

FAMILY = "sharding and reductions over ranks"
KIND = "update"
INPUTS = {"model": "tiny language model (ids -> logits)", "optimizer": "FlatShardAdamW over its parameters (2 betas as AdamW: 0.9, 0.95; lr 0.01; decoupled weight decay 0.1 on all parameters)",
          "batches": "one dict per rank for this one optimizer step: ids [rows, time]"}
SETTINGS = {}
NOTES = ("one optimizer step per call; gradient = mean over ranks of the gradient of the rank's mean next-token cross-entropy (equal tokens per rank); AdamW on all parameters with weight decay on all; no clipping. "
         "The number of batches must be the number of ranks the optimizer was made for (3). The moments live in optimizer.shards, not in optimizer.state.")


class Tiny(torch.nn.Module):
    def __init__(self, vocab=32, width=15):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.mid = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocab)

    def forward(self, ids):
        h = self.emb(ids)
        return self.head(h + torch.tanh(self.mid(h)))


class FlatShardAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, ranks=3):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))
        self.ranks, self.shards, self.inner = ranks, None, None

    def flat(self, tensors):
        v = torch.cat([t.detach().flatten() for t in tensors])
        return F.pad(v, (0, -len(v) % self.ranks))

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for g in self.param_groups for p in g["params"]]
        weights = self.flat(params).chunk(self.ranks)
        grads = self.flat([p.grad for p in params]).chunk(self.ranks)      # reduce_scatter
        if self.shards is None:
            self.shards = [torch.nn.Parameter(w.clone()) for w in weights]
            self.inner = [torch.optim.AdamW([s], betas=self.param_groups[0]["betas"], weight_decay=self.param_groups[0]["weight_decay"]) for s in self.shards]
        for shard, inner, w, g in zip(self.shards, self.inner, weights, grads):   # each on its own rank
            inner.param_groups[0]["lr"] = self.param_groups[0]["lr"]
            shard.copy_(w)
            shard.grad = g.clone()
            inner.step()
        gathered, at = torch.cat([s.detach() for s in self.shards]), 0         # all_gather
        for p in params:
            p.copy_(gathered[at:at + p.numel()].view_as(p))
            at += p.numel()


def make(seed):
    torch.manual_seed(seed)
    model = Tiny()
    return {"model": model, "optimizer": FlatShardAdamW(model.parameters()), "batches": [{"ids": torch.randint(0, 32, (2, 8))} for _ in range(3)]}


def right(model, optimizer, batches):
    optimizer.zero_grad()
    for b in batches:
        ids = b["ids"]
        (F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    case, twin = make(0), make(0)
    opt = torch.optim.AdamW(twin["model"].parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    ids = torch.cat([b["ids"] for b in twin["batches"]])
    vec = lambda m: torch.cat([p.detach().flatten().clone() for p in m.parameters()])
    before = vec(case["model"])
    print("parameters", before.numel(), "padded to", len(case["optimizer"].flat(list(case["model"].parameters()))))
    for _ in range(4):
        right(**case)
        opt.zero_grad()
        F.cross_entropy(twin["model"](ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        opt.step()
    print("update", (vec(case["model"]) - before).norm().item(), "difference to one process", (vec(case["model"]) - vec(twin["model"])).abs().max().item())
    assert torch.allclose(vec(case["model"]), vec(twin["model"]), atol=2e-5)
