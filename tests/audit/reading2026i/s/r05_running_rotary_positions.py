"""Packed rows with running positions: rotary positions are not reset at document borders (Megatron-LM with --reset-attention-mask but without --reset-position-ids). Since rotary attention depends only on position differences and attention is confined to a document,
the result equals reset positions. A checker that wants positions to restart at 0 would object."""
import torch
from torch import nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time], several documents per row, no padding", "doc": "document number within the row, [rows, time], grows from left to right"}
SETTINGS = {}
NOTES = "Next-token cross-entropy, mean over all targets of all rows; the first token of a document is no target (nothing of its document precedes it). Attention is causal and within the document. Positions run through the row. All parameters are used."


class Rotary(nn.Module):
    def __init__(self, vocab=40, width=16):
        super().__init__()
        self.emb, self.qkv, self.out, self.head = nn.Embedding(vocab, width), nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, vocab)
        self.register_buffer("freq", 10000 ** (-torch.arange(0, width // 2) / (width // 2)))

    def rotate(self, x, pos):
        a = pos[..., None] * self.freq
        x1, x2 = x.chunk(2, -1)
        return torch.cat([x1 * a.cos() - x2 * a.sin(), x1 * a.sin() + x2 * a.cos()], -1)

    def forward(self, ids, pos, allowed):
        x = self.emb(ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = self.rotate(q, pos), self.rotate(k, pos)
        s = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~allowed, -1e9)
        return self.head(x + self.out(s.softmax(-1) @ v))


def make(seed):
    torch.manual_seed(seed)
    doc = torch.tensor([[0] * 5 + [1] * 4 + [2] * 7, [0] * 9 + [1] * 7])
    return {"model": Rotary(), "ids": torch.randint(0, 40, (2, 16)), "doc": doc}


def right(model, batch):
    ids, doc = batch["ids"], batch["doc"]
    t = ids.shape[1]
    pos = torch.arange(t).expand_as(ids)
    allowed = (doc[:, :, None] == doc[:, None, :]) & torch.ones(t, t, dtype=torch.bool).tril()
    logits = model(ids, pos, allowed)
    same = doc[:, 1:] == doc[:, :-1]
    return F.cross_entropy(logits[:, :-1][same], ids[:, 1:][same])


if __name__ == "__main__":
    d = make(0)
    model = d.pop("model")
    loss = right(model, d)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    terms = []
    for row, docs in zip(d["ids"], d["doc"]):
        for k in docs.unique():
            one = row[docs == k][None]
            n = one.shape[1]
            lp = model(one, torch.arange(n)[None], torch.ones(1, n, n, dtype=torch.bool).tril()).log_softmax(-1)
            terms += [-lp[0, j - 1, one[0, j]] for j in range(1, n)]
    print("packed", loss.item(), "each document alone", torch.stack(terms).mean().item())
    assert abs(loss.item() - torch.stack(terms).mean().item()) < 1e-5
