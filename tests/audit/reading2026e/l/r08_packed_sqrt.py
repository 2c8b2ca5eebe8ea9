"""Packed rows with square-root averaging (InternVL 2.5). Every trained token of a document with n trained tokens
weighs n ** -0.5, which lies between token mean and document mean; the divisor is the sum of the weights. Documents are kept
apart by a block-diagonal mask and positions that start again, and no document predicts the first token of the next."""
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids of packed documents, [rows, time]", "segment": "document number within the row from 1, 0 is padding, [rows, time]",
          "loss_mask": "1 where the token is trained, [rows, time]"}
SETTINGS = {"power": "exponent of the document length, 0.5"}
NOTES = ("Reduction: weighted mean over trained tokens of all rows, weight = (trained tokens of the document) ** -power, "
         "normalised by the sum of weights of the whole batch. Supervised, packed. The first token of a document is never a "
         "target even if loss_mask is 1. Positions up to 64.")
import torch
import torch.nn as nn
import torch.nn.functional as F


class Attn(nn.Module):
    """One attention layer; `allowed` [rows, query, key] says what is visible."""
    def __init__(self, vocab=24, width=16, length=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions, allowed):
        x = self.emb(ids) + self.pos(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        s = s.masked_fill(~allowed, -1e9)
        return self.head(x + s.softmax(-1) @ v)


def make(seed):
    torch.manual_seed(seed)
    n, t = 4, 16
    ids = torch.randint(1, 24, (n, t))
    seg = torch.zeros(n, t, dtype=torch.long)
    mask = torch.zeros(n, t)
    for i in range(n):
        at, k = 0, 1
        while at < t:
            size = int(torch.randint(3, 8, ()))
            if at + size > t:
                break
            seg[i, at:at + size] = k
            mask[i, at + int(torch.randint(0, 3, ())):at + size] = 1.0
            at, k = at + size, k + 1
        ids[i, at:] = 0
    return {"ids": ids, "segment": seg, "loss_mask": mask, "model": Attn()}


def right(model, batch, power=0.5):
    ids, seg = batch["ids"], batch["segment"]
    n, t = ids.shape
    index = torch.arange(t).expand(n, t)
    fresh = torch.ones(n, t, dtype=torch.bool)
    fresh[:, 1:] = seg[:, 1:] != seg[:, :-1]
    start = torch.where(fresh, index, torch.zeros_like(index)).cummax(1).values
    same = seg[:, :, None] == seg[:, None, :]
    causal = torch.ones(t, t, dtype=torch.bool).tril()
    logits = model(ids, index - start, same & causal)
    ce = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    keep = batch["loss_mask"][:, 1:] * (~fresh[:, 1:]).float() * (seg[:, 1:] > 0).float()
    doc = (torch.arange(n)[:, None] * (t + 1) + seg[:, 1:])
    size = torch.zeros(n * (t + 1)).index_add(0, doc.reshape(-1), keep.reshape(-1))
    weight = keep * size[doc].clamp(min=1.0).pow(-power)
    return (ce * weight).sum() / weight.sum().clamp(min=1e-8)


def check(loss, model, want, tol=1e-4):
    model.zero_grad()
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    for n, g in grads.items():
        assert g is not None and float(g.abs().sum()) > 0, n
    norm = sum(float(g.pow(2).sum()) for g in grads.values()) ** 0.5
    print("loss %.6f  slow loop %.6f  grad norm %.5f" % (loss.item(), float(want), norm))
    assert abs(loss.item() - float(want)) < tol


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    num = den = 0.0
    for i in range(4):
        for k in range(1, int(d["segment"][i].max()) + 1):
            where = (d["segment"][i] == k).nonzero().flatten()
            ids, mask = d["ids"][i, where], d["loss_mask"][i, where]
            s = len(ids)
            lp = m(ids[None], torch.arange(s)[None], torch.ones(1, s, s, dtype=torch.bool).tril())[0].log_softmax(-1)
            losses = [-float(lp[j - 1, ids[j]]) for j in range(1, s) if mask[j] > 0]
            num += sum(losses) * len(losses) ** -0.5 if losses else 0
            den += len(losses) ** 0.5 if losses else 0
    check(right(m, d), m, num / den)
