"""Packed SFT with square averaging: each document weighs sqrt(its trained tokens) (InternVL 2.5's "square averaging", between token and sample averaging). Token weights 1/sqrt(n) are normalised by their sum over the batch, so neither a token mean nor a document mean comes out."""
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids, [rows, time]", "seg": "[rows, time], document number 1, 2, … inside the row, 0 for padding", "loss_mask": "[rows, time], 1 where the token is trained"}
SETTINGS = {}
NOTES = "Supervised. Reduction: weighted mean over trained tokens of all rows, weight 1/sqrt(trained tokens of the token's document). Attention is block-diagonal causal and positions restart per document, both built inside. The first token of a document is never a target, whatever loss_mask says, and is not counted. No parameter unused."
import torch
from torch import nn


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_len=96):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_len, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, mask=None):
        """ids [B, T]; positions [B, T]; mask [B, T, T], True where query may see key. Returns logits [B, T, V]."""
        B, T = ids.shape
        if positions is None:
            positions = torch.arange(T).expand(B, T)
        if mask is None:
            mask = torch.ones(T, T, dtype=torch.bool).tril().expand(B, T, T)
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        a = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        a = a.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out(a @ v)
        return self.head(torch.tanh(x))


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    seg = torch.tensor([[1] * 9 + [2] * 4 + [3] * 6 + [0], [1] * 3 + [2] * 14 + [0] * 3])
    ids = torch.randint(1, 32, seg.shape, generator=g) * (seg > 0)
    mask = (torch.rand(seg.shape, generator=g) < 0.7) & (seg > 0)
    return {"model": TinyLM(), "ids": ids, "seg": seg, "loss_mask": mask.long()}


def right(model, batch):
    ids, seg = batch["ids"], batch["seg"]
    T = ids.shape[1]
    same = seg[:, :, None] == seg[:, None, :]
    mask = same & torch.ones(T, T, dtype=torch.bool).tril()
    positions = mask.sum(-1) - 1
    nll = -model(ids, positions, mask)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    on = batch["loss_mask"][:, 1:].bool() & (seg[:, 1:] == seg[:, :-1]) & (seg[:, 1:] > 0)
    n = (same[:, 1:, 1:] & on[:, None, :]).sum(-1)                  # trained tokens of my document
    w = on / n.clamp(min=1).to(nll.dtype).sqrt()
    return (nll * w).sum() / w.sum().clamp(min=1e-9)


if __name__ == "__main__":
    b = make(0)
    m = b.pop("model")
    loss = right(m, b)
    loss.backward()
    top = bot = 0.0
    for r in range(2):
        for k in range(1, int(b["seg"][r].max()) + 1):
            idx = b["seg"][r] == k
            d, on = b["ids"][r][idx], b["loss_mask"][r][idx].clone()
            on[0] = 0
            lp = m(d[None])[0].log_softmax(-1)
            v = [-lp[t - 1, d[t]].item() for t in range(1, len(d)) if on[t]]
            if v:
                top += sum(v) / len(v) ** 0.5
                bot += len(v) ** 0.5
    gn = sum(p.grad.norm() for p in m.parameters())
    print(loss.item(), top / bot, "grad", gn.item())
    assert abs(loss.item() - top / bot) < 1e-5 and gn > 0
