"""Packed rows whose boundaries are read off the EOS token (Megatron reset_position_ids / reset_attention_mask / eod_mask, Llama 3 intra-document mask). EOS belongs to the document it ends and is trained as a target; the token after EOS is not a target; positions restart inside the row."""
import torch
from torch import nn
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "packed token ids, documents end with EOS = 0, the last document of a row may be cut, [rows, time]"}
SETTINGS = {}
NOTES = "Cross entropy, mean over all targets of all rows; a target is every token except the first of each document. No loss_mask input: it follows from ids. EOS inside the row is always a boundary. Every parameter is used."
EOS = 0
class Tiny(nn.Module):
    """One attention layer and an MLP-free head; position_ids and allowed ([B,T,T] bool) are optional."""
    def __init__(self, vocab=40, width=16, places=64):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(places, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids, position_ids=None, allowed=None):
        T = ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(T).expand_as(ids)
        if allowed is None:
            allowed = torch.ones(T, T, dtype=torch.bool).tril().expand(ids.shape[0], T, T)
        h = self.emb(ids) + self.pos(position_ids)
        s = self.q(h) @ self.k(h).transpose(1, 2) / h.shape[-1] ** 0.5
        a = s.masked_fill(~allowed, float("-inf")).softmax(-1)
        return self.head(h + self.o(a @ self.v(h)))

def make(seed):
    g = torch.Generator().manual_seed(seed); torch.manual_seed(seed)
    ids = torch.randint(1, 40, (3, 24), generator=g)
    for b, ends in enumerate(([5, 6 + 6, 23], [8], [3, 4 + 3, 15, 20])):
        ids[b, ends] = EOS
    return {"model": Tiny(), "ids": ids}

def right(model, batch):
    ids = batch["ids"]
    ended = (ids == EOS).long()
    doc = ended.cumsum(1) - ended                                   # exclusive: EOS stays with its own document
    T = ids.shape[1]; where = torch.arange(T).expand_as(ids)
    first = torch.ones_like(ids, dtype=torch.bool); first[:, 1:] = doc[:, 1:] != doc[:, :-1]
    start = torch.where(first, where, 0).cummax(1).values
    allowed = (doc[:, :, None] == doc[:, None]) & torch.ones(T, T, dtype=torch.bool).tril()
    logits = model(ids, where - start, allowed)
    target = ids.masked_fill(first, -100)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten(), ignore_index=-100)

if __name__ == "__main__":
    d = make(0); model = d.pop("model"); loss = right(model, d); loss.backward()
    tot, n = 0.0, 0
    for row in d["ids"].tolist():
        doc = []
        for i, t in enumerate(row):
            doc.append(t)
            if t == EOS or i == len(row) - 1:
                lp = model(torch.tensor([doc]))[0].log_softmax(-1)
                for j in range(1, len(doc)):
                    tot -= lp[j - 1, doc[j]].item(); n += 1
                doc = []
    print(loss.item(), tot / n); assert abs(loss.item() - tot / n) < 1e-5
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())
