"""Packed rows without any attention mask: the document borders are read off the position ids.
transformers (padding-free flash attention), TRL padding_free. A position of 0 starts a document; the token before a start has no target, although it is not padding and its label is an ordinary token. Attention is
block-diagonal and causal. Labels are a plain copy of the ids; the shift and the removal of the border targets are done in the loss."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "documents end to end, no padding, [rows, time]", "position_ids": "counts from 0 in each document, [rows, time]"}
SETTINGS = {}
NOTES = "Cross entropy, mean over all targets of all rows; the first token of each document is no target. Rows are full; documents have any length from 1 on (a document of length 1 has no target). All parameters used."

class TinyLM(nn.Module):
    """One causal attention layer; `allowed` [.., q, k] replaces the causal mask when given."""
    def __init__(self, vocab=29, width=16, out=None):
        super().__init__()
        self.width = width
        self.emb = nn.Embedding(vocab, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, out or vocab)

    def forward(self, ids, positions=None, allowed=None):
        T = ids.shape[1]
        if positions is None:
            positions = torch.arange(T).expand_as(ids)
        freq = torch.exp(-0.7 * torch.arange(self.width // 2))
        ang = positions[..., None].float() * freq
        h = self.emb(ids) + torch.cat([ang.sin(), ang.cos()], -1)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril()
        att = self.q(h) @ self.k(h).transpose(1, 2) / math.sqrt(self.width)
        h = h + self.o(att.masked_fill(~allowed, float("-inf")).softmax(-1) @ self.v(h))
        return self.head(torch.tanh(h))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    pos = torch.zeros(3, 20, dtype=torch.long)
    for r in range(3):
        i = 0
        while i < 20:
            n = min(int(torch.randint(1, 9, (1,), generator=g)), 20 - i)
            pos[r, i:i + n] = torch.arange(n); i += n
    return {"model": TinyLM(), "ids": torch.randint(0, 29, (3, 20), generator=g), "position_ids": pos}


def right(model, batch):
    ids, pos = batch["ids"], batch["position_ids"]
    doc = (pos == 0).cumsum(1)
    allowed = (doc[:, :, None] == doc[:, None, :]) & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    logits = model(ids, pos, allowed)
    labels = ids.clone()
    labels[pos == 0] = -100
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


if __name__ == "__main__":
    d = make(0); m = d.pop("model")
    loss = right(m, d); loss.backward()
    total, n = 0.0, 0
    for r in range(3):
        starts = (d["position_ids"][r] == 0).nonzero().flatten().tolist() + [20]
        for a, b in zip(starts, starts[1:]):
            x = d["ids"][r:r + 1, a:b]
            if b - a > 1:
                total = total + F.cross_entropy(m(x)[0, :-1], x[0, 1:], reduction="sum"); n += b - a - 1
    print("packed", loss.item(), "one by one", (total / n).item(), "gradient", m.emb.weight.grad.norm().item())
    assert torch.allclose(loss, total / n, atol=1e-5)
