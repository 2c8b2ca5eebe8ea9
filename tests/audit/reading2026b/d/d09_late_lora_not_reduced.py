"""LoRA weights that are added after FSDP wrapping keep the gradient of their own rank.
hao-ai-lab/FastVideo#1666, https://github.com/hao-ai-lab/FastVideo/pull/1666, 2026 (July).
FSDP reduces only the parameters that it wrapped. Adapters injected later are plain tensors labelled
as replicated, and nothing averages their gradients. Each rank trains its adapter on its own data
and rank 0's is the one saved."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'sharding'
KIND = 'update'
INPUTS = {
    'model': "attention model with a LoRA adapter on q, k, v (rank 0's copy; all copies start equal)",
    'optimizer': 'optimizer over the trainable parameters',
    'batches': "one batch per data-parallel rank for each step: list of steps, each a list of {'ids': [rows, time]}",
}
SETTINGS = {}
NOTES = (
    'Data parallel: each trainable parameter gets the mean over ranks of the local gradients. '
    'Trainable are the norm and the head (wrapped by FSDP) and the adapter. The base weights are '
    "frozen. The function leaves rank 0's weights in model. "
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


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / r
        self.lora_a = nn.Parameter(torch.randn(r, base.in_features) * 0.3)
        self.lora_b = nn.Parameter(torch.randn(base.out_features, r) * 0.1)

    def forward(self, x):
        return self.base(x) + self.scale * x @ self.lora_a.T @ self.lora_b.T


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Tiny()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(("norm", "head")))
    model.qkv = LoRALinear(model.qkv)
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return {"model": model, "optimizer": opt,
            "batches": [[{"ids": torch.randint(0, 20, (2, 8), generator=g)} for _ in range(2)] for _ in range(3)]}


def _run(model, optimizer, batches, reduced):
    ranks = len(batches[0])
    copies = [model] + [copy.deepcopy(model) for _ in range(ranks - 1)]
    lr = optimizer.param_groups[0]["lr"]
    opts = [optimizer] + [torch.optim.SGD([p for p in c.parameters() if p.requires_grad], lr=lr) for c in copies[1:]]
    for step in batches:
        for c, b in zip(copies, step):
            c.zero_grad()
            logits = c(b["ids"])[:, :-1]
            F.cross_entropy(logits.flatten(0, 1), b["ids"][:, 1:].flatten()).backward()
        for group in zip(*[c.named_parameters() for c in copies]):
            name, p = group[0]
            if p.requires_grad and reduced(name):
                mean = torch.stack([q.grad for _, q in group]).mean(0)
                for _, q in group:
                    q.grad.copy_(mean)
        for o in opts:
            o.step()


def broken(model, optimizer, batches):
    wrapped = {n for n, _ in Tiny().named_parameters()}      # what FSDP knew when it wrapped the model
    _run(model, optimizer, batches, lambda name: name in wrapped)


def right(model, optimizer, batches):
    _run(model, optimizer, batches, lambda name: True)


if __name__ == "__main__":
    ends = []
    for f in (broken, right):
        d = make(0)
        f(**d)
        ends.append({n: p.detach().clone() for n, p in d["model"].named_parameters()})
    d = make(0)                                              # reference: one process, both ranks' rows
    for step in d["batches"]:
        d["optimizer"].zero_grad()
        sum(F.cross_entropy(d["model"](b["ids"])[:, :-1].flatten(0, 1), b["ids"][:, 1:].flatten()) for b in step).div(2).backward()
        d["optimizer"].step()
    ref = dict(d["model"].named_parameters())
    for n in ("qkv.lora_a", "qkv.lora_b", "head.weight"):
        print(n, "broken off by", (ends[0][n] - ref[n]).abs().max().item(), "right off by", (ends[1][n] - ref[n]).abs().max().item())
    assert all(torch.allclose(ends[1][n], ref[n], atol=1e-5) for n in ends[1])
    assert (ends[0]["qkv.lora_b"] - ref["qkv.lora_b"]).abs().max() > 1e-4
