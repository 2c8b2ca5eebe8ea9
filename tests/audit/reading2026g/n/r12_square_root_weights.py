"""Square averaging (InternVL 2.5, Chen et al. 2024). Each trained token of a packed document weighs 1 / sqrt(number of trained tokens of its document), between the token mean (weight 1) and the sample mean (1/n); the sum is divided by the sum of the weights, not by the count."""
import torch
from torch import nn
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "packed ids, [rows, time]", "doc": "document number in its row, 0, 1, ..., non-decreasing, [rows, time]", "position_ids": "position in the document, [rows, time]",
          "loss_mask": "1 where the token is trained, never at the first token of a document, [rows, time]"}
SETTINGS = {"power": "0.5; 0 would be the token mean, 1 the sample mean"}
NOTES = "Cross entropy. Reduction: weighted mean over trained tokens of all rows, weight n_doc ** -power with n_doc the trained tokens of the document. Documents with no trained token do not count. Every parameter is used."
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
    docs, poss, masks = [], [], []
    for lens in ([4, 9, 7], [12, 3, 5]):
        docs.append(sum(([i] * n for i, n in enumerate(lens)), [])); poss.append(sum((list(range(n)) for n in lens), []))
        masks.append(sum(([0] * (n // 3) + [1] * (n - n // 3) for n in lens), []))
    doc, pos, mask = torch.tensor(docs), torch.tensor(poss), torch.tensor(masks).float()
    return {"model": Tiny(), "ids": torch.randint(0, 40, doc.shape, generator=g), "doc": doc, "position_ids": pos, "loss_mask": mask}

def right(model, batch, power=0.5):
    ids, doc, mask = batch["ids"], batch["doc"], batch["loss_mask"]
    B, T = ids.shape
    allowed = (doc[:, :, None] == doc[:, None]) & torch.ones(T, T, dtype=torch.bool).tril()
    logits = model(ids, batch["position_ids"], allowed)
    n = torch.zeros(B, int(doc.max()) + 1).scatter_add_(1, doc, mask)
    w = (mask * n.gather(1, doc).clamp(min=1) ** -power)[:, 1:]
    ce = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return (ce * w).sum() / w.sum()

if __name__ == "__main__":
    d = make(0); model = d.pop("model"); loss = right(model, d); loss.backward()
    num = den = 0.0
    for b in range(2):
        for k in range(3):
            at = (d["doc"][b] == k).nonzero()[:, 0]; x, m = d["ids"][b, at], d["loss_mask"][b, at]
            lp = model(x[None])[0].log_softmax(-1); n = m.sum().item()
            for j in range(1, len(x)):
                if m[j]:
                    num -= lp[j - 1, x[j]].item() / n ** .5; den += n ** -.5
    print(loss.item(), num / den); assert abs(loss.item() - num / den) < 1e-5
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())
