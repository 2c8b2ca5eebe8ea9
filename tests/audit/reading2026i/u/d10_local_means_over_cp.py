"""SFT loss is a mean of local means over ranks, sequence shards and micro-steps. PrimeIntellect-ai/prime-rl#1961 (also #1957, #1960), https://github.com/PrimeIntellect-ai/prime-rl/pull/1961, 2026.
Each rank took loss[loss_mask].mean() on its own shard and micro-batch, divided by the number of micro-steps, and FSDP averaged the gradients, over context-parallel ranks too.
Shards with few trained tokens (the first half of a sequence is mostly prompt) gave each of them a larger weight."""
import math
import torch

FAMILY = "sharding"
KIND = "update"
INPUTS = {"model": "tiny causal language model", "optimizer": "SGD", "batches": "list of micro-steps, each a list of one dict per rank: ids [1, time] the whole sequence of the context-parallel group, target [1, time] (already shifted), loss_mask [1, time] trained targets, span (start, end) of the rank's shard"}
SETTINGS = {}
NOTES = "Two context-parallel ranks share each sequence; gradients are averaged over ranks (FSDP). The objective is the mean over all trained tokens of the whole step. Every step has at least one trained token; a shard may have none."


class TinyLM(torch.nn.Module):
    """One causal attention layer with fixed sinusoidal positions; every parameter is used by every forward."""
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = torch.nn.Embedding(vocab, width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.head = torch.nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, mask=None):
        b, t = ids.shape
        w = self.emb.embedding_dim
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        if mask is None:
            mask = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        freq = torch.exp(-torch.arange(0, w, 2).float() / w * math.log(100.0))
        ang = positions.float().unsqueeze(-1) * freq
        x = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(-1, -2) / math.sqrt(w)
        score = score.masked_fill(~mask, -1e9)
        return x + self.out(score.softmax(-1) @ v)

    def forward(self, ids, positions=None, mask=None):
        return self.head(self.hidden(ids, positions, mask))


def make(seed):
    torch.manual_seed(seed)
    model = TinyLM()
    steps = []
    for _ in range(3):
        n = 14
        seq = torch.randint(0, 32, (1, n + 1))
        mask = torch.zeros(1, n)
        start = int(torch.randint(3, 6, ())); end = int(torch.randint(9, n + 1, ()))
        mask[:, start:end] = 1
        steps.append([{"ids": seq[:, :-1], "target": seq[:, 1:], "loss_mask": mask, "span": s} for s in ((0, 7), (7, 14))])
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": steps}


def _shard(model, b):
    lo, hi = b["span"]
    nll = torch.nn.functional.cross_entropy(model(b["ids"])[0], b["target"][0], reduction="none")[lo:hi]
    return nll, b["loss_mask"][0, lo:hi]


def _step(model, optimizer, ranks):
    """ranks: list over ranks of lists of gradients; FSDP averages over ranks."""
    for i, p in enumerate(model.parameters()):
        p.grad = sum(g[i] for g in ranks) / len(ranks)
    optimizer.step()
    optimizer.zero_grad()


def broken(model, optimizer, batches):
    world, accum = len(batches[0]), len(batches)
    ranks = []
    for r in range(world):
        total = 0.0
        for micro in batches:
            nll, mask = _shard(model, micro[r])
            total = total + (nll * mask).sum() / mask.sum().clamp(min=1) / accum
        ranks.append(torch.autograd.grad(total, list(model.parameters())))
    _step(model, optimizer, ranks)


def right(model, optimizer, batches):
    world = len(batches[0])
    count = sum(b["loss_mask"][0, b["span"][0]:b["span"][1]].sum() for micro in batches for b in micro)   # all-reduce
    ranks = []
    for r in range(world):
        total = 0.0
        for micro in batches:
            nll, mask = _shard(model, micro[r])
            total = total + (nll * mask).sum() * world / count
        ranks.append(torch.autograd.grad(total, list(model.parameters())))
    _step(model, optimizer, ranks)


if __name__ == "__main__":
    def flat(m):
        return torch.cat([p.detach().reshape(-1) for p in m.parameters()])
    def one(model, optimizer, batches):
        nll = torch.cat([torch.nn.functional.cross_entropy(model(s[0]["ids"])[0], s[0]["target"][0], reduction="none") for s in batches])
        mask = torch.cat([s[0]["loss_mask"][0] for s in batches])
        ((nll * mask).sum() / mask.sum()).backward()
        optimizer.step()
    res = {}
    for f in (broken, right, one):
        m = make(0); f(**m); res[f.__name__] = flat(m["model"])
    print("distance to one process: broken", (res["broken"] - res["one"]).abs().max().item(), "right", (res["right"] - res["one"]).abs().max().item())
    assert (res["right"] - res["one"]).abs().max() < 1e-5 < 1e-3 < (res["broken"] - res["one"]).abs().max()
