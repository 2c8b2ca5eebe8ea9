"""The clipping norm is the mean of the ranks' norms although each rank owns other experts.
deepspeedai/DeepSpeed#8478, https://github.com/deepspeedai/DeepSpeed/pull/8478, 2026 (September).
clip_grad_norm_ averages the per-rank norms over the data-parallel group. That is the global norm
only if all ranks hold the same parameters. With experts split over ranks sqrt(20) and sqrt(100)
become 7.24 instead of sqrt(120) = 10.95, and the clipping coefficient is too large."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'sharding'
KIND = 'update'
INPUTS = {
    'model': 'attention model with 4 experts; rank 0 owns experts 0 and 1, rank 1 owns 2 and 3',
    'optimizer': 'optimizer over all parameters',
    'batches': "one batch per data-parallel rank: {'ids': [rows, time]}",
}
SETTINGS = {
    'max_norm': 'gradient clipping norm, 0.5',
}
NOTES = (
    'One step. Gradient: mean over the ranks of the mean token cross-entropy. Shared parameters are '
    'replicated, experts exist once. Clipping by the global 2-norm over every parameter once. '
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


class MoE(Tiny):
    def __init__(self, vocab=20, width=16, experts=4):
        super().__init__(vocab, width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        for e in self.experts:
            nn.init.normal_(e.weight, std=0.2)
        nn.init.normal_(self.router.weight, std=1.0)

    def forward(self, ids):
        h = self.hidden(ids)
        w = self.router(h).softmax(-1)
        y = torch.stack([torch.tanh(e(h)) for e in self.experts], -1)
        return self.head(h + 8 * (y * w[..., None, :]).sum(-1))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = MoE()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "batches": [{"ids": torch.randint(0, 20, (3, 8), generator=g)} for _ in range(2)]}


RANKS = 2


def _backward(model, optimizer, batches):
    optimizer.zero_grad()
    for b in batches:
        logits = model(b["ids"])[:, :-1]
        (F.cross_entropy(logits.flatten(0, 1), b["ids"][:, 1:].flatten()) / len(batches)).backward()


def _squares(model):
    """squared norms: shared parameters, and the experts of each rank"""
    shared, owned = torch.zeros(()), [torch.zeros(()) for _ in range(RANKS)]
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        sq = p.grad.pow(2).sum()
        if name.startswith("experts."):
            owned[int(name.split(".")[1]) // 2] += sq
        else:
            shared += sq
    return shared, owned


def _clip(model, total, max_norm):
    coef = min(1.0, max_norm / (total.item() + 1e-6))
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(coef)


def broken(model, optimizer, batches, max_norm=0.5):
    _backward(model, optimizer, batches)
    shared, owned = _squares(model)
    per_rank = [(shared + o).sqrt() for o in owned]
    total = sum(n / RANKS for n in per_rank)               # all_reduce of norm / world size
    _clip(model, total, max_norm)
    optimizer.step()


def right(model, optimizer, batches, max_norm=0.5):
    _backward(model, optimizer, batches)
    shared, owned = _squares(model)
    total = (shared + sum(owned)).sqrt()                   # all_reduce of the experts' squares
    _clip(model, total, max_norm)
    optimizer.step()


if __name__ == "__main__":
    results = []
    for f in (broken, right):
        d = make(0)
        before = torch.cat([p.detach().flatten().clone() for p in d["model"].parameters()])
        f(**d)
        after = torch.cat([p.detach().flatten() for p in d["model"].parameters()])
        results.append(after - before)
        print(f.__name__, "norm of the clipped gradient", (results[-1].norm() / 0.1).item())
    assert abs(results[1].norm().item() / 0.1 - 0.5) < 1e-3
    assert results[0].norm() > results[1].norm() * 1.005
