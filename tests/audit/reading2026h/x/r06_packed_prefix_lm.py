"""Packed prefix LM: within each document the prefix attends in both directions (T5 and UL2 prefix LM, PaliGemma).
Prefix tokens see the whole prefix, thus also later tokens; that is no leak, as only suffix tokens are targets. The first suffix token is
predicted at the last prefix token. Positions restart for each document and documents do not see each other."""
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "packed token ids, [rows, time]", "doc": "document number of each token, from 1; 0 is padding, [rows, time]", "prefix": "1 on prefix tokens, [rows, time]"}
SETTINGS = {}
NOTES = ("Mean cross entropy over the suffix tokens of all documents of all rows. The attention is not causal inside a prefix, on purpose. Each document has at least one prefix token and one "
         "suffix token. The value does not depend on how documents are spread over rows. Every parameter is used.")
import torch
import torch.nn.functional as F
from torch import nn


class Tiny(nn.Module):
    """One causal attention layer: ids [rows, time] -> logits [rows, time, vocabulary]."""
    def __init__(self, vocab=40, width=16, length=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, positions=None, allow=None):
        t = torch.arange(ids.shape[1])
        x = self.embed(ids) + self.pos(t if positions is None else positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        score = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        allow = (t[:, None] >= t[None]) if allow is None else allow
        return self.head(x + score.masked_fill(~allow, float("-inf")).softmax(-1) @ v)


def make(seed):
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    ids, doc, pre = torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16, dtype=torch.long), torch.zeros(2, 16)
    for r, spec in enumerate([[(3, 4), (2, 3)], [(4, 2), (1, 3), (2, 4)]]):
        at = 0
        for k, (p, s) in enumerate(spec, 1):
            ids[r, at:at + p + s] = torch.randint(1, 40, (p + s,), generator=g)
            doc[r, at:at + p + s] = k
            pre[r, at:at + p] = 1
            at += p + s
    return {"model": Tiny(), "ids": ids, "doc": doc, "prefix": pre}


def right(model, batch):
    ids, doc, pre = batch["ids"], batch["doc"], batch["prefix"].bool()
    t = torch.arange(ids.shape[1])
    new = torch.ones_like(doc, dtype=torch.bool)
    new[:, 1:] = doc[:, 1:] != doc[:, :-1]
    start = torch.where(new, t.expand_as(doc), torch.zeros_like(doc)).cummax(1).values
    same = doc[:, :, None] == doc[:, None, :]
    allow = same & ((t[:, None] >= t[None]) | (pre[:, :, None] & pre[:, None, :]))
    logits = model(ids, positions=t - start, allow=allow)
    target = (doc > 0) & ~pre
    nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view_as(ids[:, 1:])
    keep = target[:, 1:].float()
    return (nll * keep).sum() / keep.sum()


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    loss = right(m, d)
    loss.backward()
    tot = n = 0
    for r in range(2):
        for k in range(1, int(d["doc"][r].max()) + 1):
            sel = d["doc"][r] == k
            x, p = d["ids"][r][sel][None], int(d["prefix"][r][sel].sum())
            L = x.shape[1]
            allow = torch.tril(torch.ones(L, L)).bool()
            allow[:p, :p] = True
            lp = m(x, allow=allow[None]).log_softmax(-1)
            for t in range(p, L):
                tot -= lp[0, t - 1, x[0, t]].item()
                n += 1
    print(loss.item(), tot / n, m.embed.weight.grad.norm().item())
    assert abs(loss.item() - tot / n) < 1e-5
