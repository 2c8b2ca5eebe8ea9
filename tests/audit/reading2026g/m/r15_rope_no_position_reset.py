"""Packed documents without restarting the positions. With rotary embeddings only differences of positions enter the attention, so under a block-diagonal mask running positions 0 … T-1 over the whole row give the same logits as restarted ones (why FlexAttention/torchtitan document masking leaves the RoPE table alone)."""
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "doc": "[rows, time], document number, -1 for padding"}
SETTINGS = {}
NOTES = "Supervised. Reduction: mean over all targets of all rows (every token that has a predecessor in its own document). Positions are not restarted by design; the model has no absolute position. No parameter unused."
import torch
from torch import nn


class RopeLM(nn.Module):
    def __init__(self, vocab=32, width=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)
        self.register_buffer("freq", 100.0 ** (-torch.arange(0, width // 2) / (width // 2)), persistent=False)

    def rope(self, x):
        a = torch.arange(x.shape[1])[:, None] * self.freq
        u, v = x.chunk(2, -1)
        return torch.cat([u * a.cos() - v * a.sin(), u * a.sin() + v * a.cos()], -1)

    def forward(self, ids, mask=None):
        T = ids.shape[1]
        if mask is None:
            mask = torch.ones(T, T, dtype=torch.bool).tril()
        x = self.emb(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        a = (self.rope(q) @ self.rope(k).transpose(1, 2)) / q.shape[-1] ** 0.5
        x = x + self.out(a.masked_fill(~mask, float("-inf")).softmax(-1) @ v)
        return self.head(torch.tanh(x))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    doc = torch.tensor([[0] * 7 + [1] * 5 + [2] * 6, [0] * 12 + [1] * 4 + [-1] * 2])
    return {"model": RopeLM(), "ids": torch.randint(1, 32, doc.shape, generator=g) * (doc >= 0), "doc": doc}


def right(model, batch):
    ids, doc = batch["ids"], batch["doc"]
    T = ids.shape[1]
    mask = (doc[:, :, None] == doc[:, None, :]) & torch.ones(T, T, dtype=torch.bool).tril()
    labels = torch.where((doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] >= 0), ids[:, 1:], -100)
    return nn.functional.cross_entropy(model(ids, mask)[:, :-1].flatten(0, 1), labels.flatten(), ignore_index=-100)


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss = right(m, b)
    loss.backward()
    s = n = 0
    for r in range(2):
        for k in range(int(b["doc"][r].max()) + 1):
            d = b["ids"][r][b["doc"][r] == k]
            s += nn.functional.cross_entropy(m(d[None])[0, :-1], d[1:], reduction="sum").item()
            n += len(d) - 1
    gn = sum(p.grad.norm() for p in m.parameters())
    print(loss.item(), s / n, "grad", gn.item())
    assert abs(loss.item() - s / n) < 1e-5 and gn > 0
