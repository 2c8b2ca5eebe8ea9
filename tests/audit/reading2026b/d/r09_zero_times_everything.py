"""A rank without a trained token returns 0 * sum(parameters), and the step is right.
With expert or conditional parameters a rank may have nothing to train in a micro-batch. To keep the collectives
in step it back-propagates a zero that touches each parameter. The reported loss is 0, the gradient
is zero but present, and the token mean over ranks does not count the rank."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'sharding'
KIND = 'update'
INPUTS = {
    'model': 'attention model',
    'optimizer': 'optimizer over its parameters',
    'batches': "one batch per rank: {'ids': [rows, time], 'mask': [rows, time]}; the mask of a rank may be empty",
}
SETTINGS = {}
NOTES = (
    'One step; gradient of the token mean over all ranks. Ranks without targets take part with zero '
    'gradients of full shape. If no rank has a target, nothing is updated. '
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
    batches = [{"ids": torch.randint(0, 20, (2, 8), generator=g), "mask": torch.ones(2, 8)} for _ in range(3)]
    batches[seed % 3]["mask"] = torch.zeros(2, 8)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": batches}


def local_loss(model, b, tokens, world):
    mask = b["mask"][:, 1:]
    if mask.sum() == 0:
        return sum(p.sum() for p in model.parameters()) * 0.0
    ce = F.cross_entropy(model(b["ids"])[:, :-1].transpose(1, 2), b["ids"][:, 1:], reduction="none")
    return (ce * mask).sum() / tokens * world


def right(model, optimizer, batches):
    world = len(batches)
    tokens = sum(float(b["mask"][:, 1:].sum()) for b in batches)
    if tokens == 0:
        return
    grads = []
    for b in batches:
        model.zero_grad()
        local_loss(model, b, tokens, world).backward()
        assert all(p.grad is not None for p in model.parameters())        # each rank joins each collective
        grads.append([p.grad.clone() for p in model.parameters()])
    for p, *per_rank in zip(model.parameters(), *grads):
        p.grad = torch.stack(per_rank).mean(0)
    optimizer.step()


if __name__ == "__main__":
    d, e = make(0), make(0)
    right(**d)
    real = [b for b in e["batches"] if b["mask"].sum() > 0]
    sum(F.cross_entropy(e["model"](b["ids"])[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten()) for b in real).div(len(real)).backward()
    e["optimizer"].step()
    worst = max((p - q).abs().max().item() for p, q in zip(d["model"].parameters(), e["model"].parameters()))
    print("difference from the two ranks with data alone", worst)
    assert worst < 1e-5 and (d["model"].head.weight - make(0)["model"].head.weight).norm() > 0
