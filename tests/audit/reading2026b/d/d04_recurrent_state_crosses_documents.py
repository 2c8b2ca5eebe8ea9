"""A linear-attention layer keeps its state across the documents of a packed row.
THUDM/slime#1686, https://github.com/THUDM/slime/pull/1686, 2026 (March).
cu_seqlens reached the short convolution (and full attention) of Qwen3.5 / Qwen3-Next, but not the
gated delta rule. The recurrence treated the packed stream as one sequence, so each document read a
state that earlier documents had filled. The loss looks normal."""
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = 'packing'
KIND = 'loss'
INPUTS = {
    'ids': 'token ids of one packed row, [1, time]',
    'labels': 'next token of the same document, -100 on the last token of each document, [1, time]',
    'positions': 'position within the document, [1, time]',
    'cu_seqlens': 'document boundaries, first 0 and last time, [documents + 1]',
}
SETTINGS = {}
NOTES = (
    'Next-token cross-entropy, mean over the labels that are not -100. Documents of a row are '
    'independent: the loss equals that of the documents run one by one. '
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


def document_mask(cu, t):
    """causal and within one document; [1, t, t] bool"""
    doc = torch.bucketize(torch.arange(t), cu[1:], right=True)
    return ((doc[:, None] == doc[None, :]) & torch.ones(t, t, dtype=torch.bool).tril())[None]


class Hybrid(Tiny):
    """Tiny plus one gated recurrent layer (short convolution, then a decaying outer-product state)."""
    def __init__(self, vocab=20, width=16):
        super().__init__(vocab, width)
        self.conv = nn.Parameter(torch.randn(3, width) * 0.3)
        self.rqkv = nn.Linear(width, 3 * 8)
        self.gate = nn.Linear(width, 1)
        self.rout = nn.Linear(8, width)
        for layer in (self.rqkv, self.rout):
            nn.init.normal_(layer.weight, std=0.4)

    def recurrent(self, x, conv_cu, state_cu):
        t = x.shape[1]
        doc = torch.bucketize(torch.arange(t), conv_cu[1:], right=True)
        y = torch.zeros_like(x)
        for j in range(3):                                   # causal, inside a document
            shifted = F.pad(x, (0, 0, j, 0))[:, :t]
            same = F.pad(doc, (j, 0), value=-1)[:t] == doc
            y = y + self.conv[j] * shifted * same[None, :, None]
        q, k, v = self.rqkv(F.silu(y)).chunk(3, -1)
        decay = torch.sigmoid(self.gate(y) + 2.0)
        starts = set(state_cu[:-1].tolist())
        state, out = torch.zeros(x.shape[0], 8, 8), []
        for i in range(t):
            if i in starts:
                state = torch.zeros_like(state)
            state = decay[:, i, :, None] * state + k[:, i, :, None] * v[:, i, None, :]
            out.append((q[:, i, None] @ state)[:, 0])
        return x + self.rout(torch.stack(out, 1))

    def forward(self, ids, positions, cu_seqlens, state_cu_seqlens=None):
        if state_cu_seqlens is None:
            state_cu_seqlens = torch.tensor([0, ids.shape[1]])
        h = self.hidden(ids, positions, document_mask(cu_seqlens, ids.shape[1]))
        return self.head(self.recurrent(h, cu_seqlens, state_cu_seqlens))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    lengths = torch.randint(3, 9, (4,), generator=g)
    cu = F.pad(lengths.cumsum(0), (1, 0))
    t = int(cu[-1])
    ids = torch.randint(0, 20, (1, t), generator=g)
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    labels[0, cu[1:] - 1] = -100
    positions = torch.cat([torch.arange(int(n)) for n in lengths])[None]
    return {"model": Hybrid(), "ids": ids, "labels": labels, "positions": positions, "cu_seqlens": cu}


def broken(model, batch):
    logits = model(batch["ids"], batch["positions"], batch["cu_seqlens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def right(model, batch):
    logits = model(batch["ids"], batch["positions"], batch["cu_seqlens"], batch["cu_seqlens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


if __name__ == "__main__":
    b = make(0)
    model = b.pop("model")
    total, n = 0.0, 0
    for s, e in zip(b["cu_seqlens"][:-1].tolist(), b["cu_seqlens"][1:].tolist()):
        cu = torch.tensor([0, e - s])
        lo = model(b["ids"][:, s:e], b["positions"][:, s:e], cu, cu)
        total = total + F.cross_entropy(lo[0], b["labels"][0, s:e], ignore_index=-100, reduction="sum")
        n += int((b["labels"][0, s:e] != -100).sum())
    print("broken", broken(model, b).item(), "right", right(model, b).item(), "one by one", (total / n).item())
    assert torch.allclose(right(model, b), total / n, atol=1e-5)
    assert (broken(model, b) - right(model, b)).abs() > 1e-4
