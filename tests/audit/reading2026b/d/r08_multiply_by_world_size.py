"""Each rank multiplies its summed loss by the world size before backward.
Data parallel averages gradients over ranks. To get the token mean over all ranks a rank takes its own sum,
divides by the token count of all ranks and micro-batches and multiplies by the number of ranks. The
local loss is not a mean of anything local and micro-batches are not divided by their number."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'sharding'
KIND = 'update'
INPUTS = {
    'model': 'attention model',
    'optimizer': 'optimizer over its parameters',
    'batches': "batches[rank][micro] = {'ids': [rows, time], 'mask': [rows, time]}",
}
SETTINGS = {}
NOTES = (
    'One optimizer step over all ranks and micro-batches: gradient of the cross-entropy averaged '
    'over all trained targets of all of them. Gradients are summed over micro-batches and averaged '
    'over ranks. '
)


class Tiny(nn.Module):
    """Embedding + learned positions, one causal self-attention layer, MLP, head."""
    def __init__(self, vocab=20, width=16, heads=2, length=64):
        super().__init__()
        self.heads = heads
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def hidden(self, ids, positions=None, allowed=None):
        b, t = ids.shape
        if positions is None:
            positions = torch.arange(t).expand(b, t)
        ok = torch.ones(t, t, dtype=torch.bool).tril().expand(b, t, t)
        if allowed is not None:               # [b, t, t] bool, replaces the causal mask
            ok = allowed
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        s = s.masked_fill(~ok[:, None], float("-inf"))
        x = x + self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))
        return self.norm(x + self.down(F.gelu(self.up(x))))

    def forward(self, ids, positions=None, allowed=None):
        return self.head(self.hidden(ids, positions, allowed))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Tiny()
    batches = []
    for rank in range(3):
        batches.append([{"ids": torch.randint(0, 20, (2, 8), generator=g),
                         "mask": (torch.rand(2, 8, generator=g) < 0.3 + 0.2 * rank).float()} for _ in range(2)])
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


def _sum(model, b):
    ce = F.cross_entropy(model(b["ids"])[:, :-1].transpose(1, 2), b["ids"][:, 1:], reduction="none")
    return (ce * b["mask"][:, 1:]).sum()


def right(model, optimizer, batches):
    world = len(batches)
    tokens = sum(float(b["mask"][:, 1:].sum()) for rank in batches for b in rank)     # all_reduce of the counts
    grads = []
    for rank in batches:
        model.zero_grad()
        for b in rank:
            (_sum(model, b) * world / tokens).backward()
        grads.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()])
    for p, *per_rank in zip(model.parameters(), *grads):
        p.grad = torch.stack(per_rank).mean(0)                                        # DDP averages
    optimizer.step()


if __name__ == "__main__":
    d, e = make(0), make(0)
    right(**d)
    every = [b for rank in e["batches"] for b in rank]
    (sum(_sum(e["model"], b) for b in every) / sum(b["mask"][:, 1:].sum() for b in every)).backward()
    e["optimizer"].step()
    worst = max((p - q).abs().max().item() for p, q in zip(d["model"].parameters(), e["model"].parameters()))
    moved = (d["model"].head.weight - make(0)["model"].head.weight).norm().item()
    print("difference from one process", worst, "moved", moved)
    assert worst < 1e-5 and moved > 0
