"""Packed rows with square-root weights (InternVL2.5 'square averaging'). Each token of a document with n trained tokens weighs 1/sqrt(n), between the token mean and the document mean; the normaliser is the sum of weights, and the last token of a document never predicts the first of the next."""
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "documents one after another, [rows, time]", "doc": "document number in the row from 1, 0 padding, [rows, time]"}
SETTINGS = {}
NOTES = "Cross-entropy; weighted mean over all tokens that have a left neighbour in the same document, over all rows (weights sum over the whole batch). A document of one token has no target."
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

V, D = 23, 16


class Attn(nn.Module):
    """One-layer attention model. visible: bool [rows, time, time], True where the query may look."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.pos = nn.Embedding(32, D)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, ids, position_ids, visible):
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(1, 2)) / math.sqrt(D)
        a = s.masked_fill(~visible, float("-inf")).softmax(-1)
        return self.head(x + a @ v)


def make(seed):
    torch.manual_seed(seed)
    doc = torch.tensor([[1] * 6 + [2] * 2 + [3] * 4, [1] * 3 + [2] * 1 + [3] * 5 + [0] * 3])
    return {"model": Attn(), "ids": torch.randint(1, V, (2, 12)), "doc": doc}


def right(model, batch):
    doc = batch["doc"]
    t = torch.arange(doc.shape[1])
    same = doc[:, :, None] == doc[:, None, :]
    visible = same & (t[None, :] <= t[:, None])
    position_ids = visible.sum(-1) - 1
    logits = model(batch["ids"], position_ids, visible)
    ce = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["ids"][:, 1:], reduction="none")
    ok = (doc[:, 1:] == doc[:, :-1]) & (doc[:, 1:] > 0)
    n = (same.sum(-1) - 1)[:, 1:].clamp(min=1)
    w = ok / n.float().sqrt()
    return (ce * w).sum() / w.sum()


if __name__ == "__main__":
    b = make(0); model = b.pop("model"); loss = right(model, b); loss.backward(); num = den = 0.0
    for i in range(2):
        for d in (1, 2, 3):
            s = b["ids"][i][b["doc"][i] == d][None]; n = s.shape[1]
            if n > 1:
                lp = model(s, torch.arange(n)[None], torch.ones(1, n, n).tril().bool()).log_softmax(-1)
                for k in range(1, n):
                    num = num - lp[0, k - 1, s[0, k]] / math.sqrt(n - 1); den += 1 / math.sqrt(n - 1)
    assert torch.allclose(loss, num / den, atol=1e-5) and model.qkv.weight.grad.norm() > 0
    print("packed", loss.item(), "separate", (num / den).item())
