"""One scheduler with a different curve per parameter group; one group has rate 0 for the first steps.
The body is scaled by base width / width (muP), the embedding keeps the full rate, and the head stays frozen by a
rate of exactly 0 for 5 steps, then warms up when the others already decay. The groups' rates are not
proportional to each other over time."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'schedules'
KIND = 'schedule'
INPUTS = {
    'optimizer': "torch optimizer with three groups named body, embedding, head (key 'name')",
}
SETTINGS = {
    'warmup': '4',
    'total': '40',
    'base_width': '8',
    'width': '16',
    'head_delay': '5',
}
NOTES = (
    'Makes a LambdaLR. body: (8/16) * s; embedding: s; head: 0 for 5 steps, then its own warm-up of '
    '4 steps, then s; with s = linear warm-up over 4 steps, then linear decay to 0 at 40. Step 0 of '
    'body and embedding is 1/4 of the peak, not 0. '
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
    torch.manual_seed(seed)
    model = Tiny()
    parts = {"embedding": [], "head": [], "body": []}
    for n, p in model.named_parameters():
        parts["embedding" if n.startswith(("emb", "pos")) else "head" if n.startswith("head") else "body"].append(p)
    return {"optimizer": torch.optim.SGD([{"params": v, "name": k} for k, v in parts.items()], lr=1e-2)}


def right(optimizer, warmup=4, total=40, base_width=8, width=16, head_delay=5):
    def s(step):
        return (step + 1) / warmup if step < warmup else max(0.0, (total - step) / (total - warmup))

    curves = {
        "embedding": s,
        "body": lambda step: base_width / width * s(step),
        "head": lambda step: 0.0 if step < head_delay else min(1.0, (step - head_delay + 1) / warmup) * s(step),
    }
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [curves[g["name"]] for g in optimizer.param_groups])


if __name__ == "__main__":
    d = make(0)
    sched = right(**d)
    seen = []
    for step in range(41):
        seen.append({g["name"]: g["lr"] for g in d["optimizer"].param_groups})
        d["optimizer"].step()
        sched.step()
    for step in (0, 3, 4, 5, 8, 9, 20, 39, 40):
        print(step, {k: round(v, 6) for k, v in seen[step].items()})
    assert all(x["head"] == 0 for x in seen[:5]) and seen[5]["head"] > 0
    assert all(abs(x["body"] - 0.5 * x["embedding"]) < 1e-12 for x in seen) and seen[40]["body"] == 0
    assert seen[9]["head"] == seen[9]["embedding"]
