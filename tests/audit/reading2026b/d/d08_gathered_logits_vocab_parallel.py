"""Logits that were already gathered over the tensor-parallel ranks go into the vocabulary-parallel cross-entropy.
NVIDIA/Megatron-LM#7452 (item 2 of the table), https://github.com/NVIDIA/Megatron-LM/issues/7452, 2026 (September).
With parallel_output=False and labels each rank holds the full logits, but the loss still treats
them as that rank's slice of the vocabulary. The sum of exponentials counts each entry TP times (the
loss is too high by log TP) and only the first rank's copy ever holds the target."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'sharding'
KIND = 'loss'
INPUTS = {
    'ids': 'token ids, [rows, time]',
}
SETTINGS = {
    'tp': 'tensor-parallel ranks, 2',
}
NOTES = (
    "Mean next-token cross-entropy over all tokens. The head's rows are split over tp ranks "
    "(simulated in one process); a rank's gradient reaches its own rows only. The result is the "
    'ordinary cross-entropy whatever tp is. '
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
    return {"model": Tiny(), "ids": torch.randint(0, 20, (3, 9), generator=g)}


def vocab_parallel_cross_entropy(per_rank_logits, target):
    """per_rank_logits: what each rank holds of the vocabulary, in order. Reductions over ranks are sums here."""
    top = torch.stack([l.detach().amax(-1) for l in per_rank_logits]).amax(0)
    z, picked = 0.0, 0.0
    for rank, logits in enumerate(per_rank_logits):
        size = logits.shape[-1]
        logits = logits - top[..., None]
        z = z + logits.exp().sum(-1)
        local = target - rank * size
        mine = (local >= 0) & (local < size)
        value = logits.gather(-1, local.clamp(0, size - 1)[..., None]).squeeze(-1)
        picked = picked + torch.where(mine, value, torch.zeros_like(value))
    return z.log() - picked


def _local_logits(model, ids, tp):
    h = model.hidden(ids)[:, :-1]
    return [F.linear(h, w, b) for w, b in zip(model.head.weight.chunk(tp), model.head.bias.chunk(tp))]


def broken(model, batch, tp=2):
    local = _local_logits(model, batch["ids"], tp)
    gathered = []
    for rank in range(tp):                                  # gather: backward keeps the rank's own slice
        gathered.append(torch.cat([l if r == rank else l.detach() for r, l in enumerate(local)], -1))
    return vocab_parallel_cross_entropy(gathered, batch["ids"][:, 1:]).mean()


def right(model, batch, tp=2):
    local = _local_logits(model, batch["ids"], tp)
    return vocab_parallel_cross_entropy(local, batch["ids"][:, 1:]).mean()


if __name__ == "__main__":
    b = make(0)
    model = b.pop("model")
    ref = F.cross_entropy(model(b["ids"])[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten())
    print("broken", broken(model, b).item(), "right", right(model, b).item(), "plain", ref.item())
    g_ref = torch.autograd.grad(ref, model.head.weight)[0]
    g_right = torch.autograd.grad(right(model, b), model.head.weight)[0]
    g_broken = torch.autograd.grad(broken(model, b), model.head.weight)[0]
    assert torch.allclose(g_ref, g_right, atol=1e-5) and torch.allclose(right(model, b), ref, atol=1e-5)
    print("head gradient error", (g_broken - g_ref).norm().item(), "of", g_ref.norm().item())
    assert (broken(model, b) - ref).abs() > 0.5
