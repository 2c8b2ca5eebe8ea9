"""Packed row: unshifted labels with -100 on the first token of each document. transformers' DataCollatorWithFlattening convention: the loss shifts labels by one, so the label that would cross a border is the first token of the next document, and the last token of a document is a normal target.
It looks like the wrong end is masked; with labels at the index of their own token it is right."""
import torch
from torch import nn
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids of several documents in one row, [1, time]", "labels": "same as ids with -100 at each document start, not shifted, [1, time]", "position_ids": "position within the document, restarts at 0, [1, time]", "doc_ids": "document number of each token, [1, time]"}
SETTINGS = {}
NOTES = "Cross entropy, mean over trained tokens (all but the first of each document). Attention within a document only (doc_ids), positions restart. Equal to the token-weighted mean over the separate documents. Uses all parameters."


class TinyLM(nn.Module):
    def __init__(self, vocab=32, width=16, max_pos=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(max_pos, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, position_ids=None, doc_ids=None):
        n, t = ids.shape
        if position_ids is None:
            position_ids = torch.arange(t).expand(n, t)
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        allow = torch.ones(t, t, dtype=torch.bool).tril().expand(n, t, t)
        if doc_ids is not None:
            allow = allow & (doc_ids[:, :, None] == doc_ids[:, None, :])
        score = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        att = score.masked_fill(~allow, float("-inf")).softmax(-1)
        return self.head(torch.tanh(x + self.mix(att @ v)))


def make(seed):
    torch.manual_seed(seed)
    docs = [torch.randint(0, 32, (n,)) for n in (5, 2, 7)]
    ids = torch.cat(docs)[None]
    labels = torch.cat([torch.cat([torch.tensor([-100]), x[1:]]) for x in docs])[None]
    pos = torch.cat([torch.arange(len(x)) for x in docs])[None]
    doc = torch.cat([torch.full((len(x),), i) for i, x in enumerate(docs)])[None]
    return {"model": TinyLM(), "ids": ids, "labels": labels, "position_ids": pos, "doc_ids": doc}


def right(model, batch):
    logits = model(batch["ids"], batch["position_ids"], batch["doc_ids"])
    return nn.functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], ignore_index=-100)


if __name__ == "__main__":
    d = make(0)
    m = d.pop("model")
    loss = right(m, d)
    loss.backward()
    tot, n = 0.0, 0
    for k in range(3):
        x = d["ids"][:, d["doc_ids"][0] == k]
        tot += nn.functional.cross_entropy(m(x)[0, :-1], x[0, 1:], reduction="sum").item()
        n += x.shape[1] - 1
    print("packed", loss.item(), "separate", tot / n)
    assert abs(loss.item() - tot / n) < 1e-5 and m.qkv.weight.grad.norm() > 0
