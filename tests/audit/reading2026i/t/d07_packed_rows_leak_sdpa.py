"""Sample packing leaks across documents with sdpa/eager. axolotl-ai-cloud/axolotl#3796, https://github.com/axolotl-ai-cloud/axolotl/pull/3796, 2026.
The packing collator writes integer document numbers (1,1,2,2,3,0) into attention_mask. Newer mask code casts the
mask to bool, so all documents of a row look like one; with sdpa/eager nothing else separates them, and tokens attend to
the documents before them. Position ids still restart, the loss still falls."""
import torch
import torch.nn as nn
import torch.nn.functional as F
FAMILY = "packing"
KIND = "loss"
INPUTS = {"ids": "token ids of several documents in one row, [rows, time]", "attention_mask": "number of the document (1, 2, …) of each token, 0 for padding, [rows, time]",
          "position_ids": "position inside the document, [rows, time]", "labels": "ids, -100 at the first token of each document and at padding, aligned with ids, [rows, time]"}
SETTINGS = {}
NOTES = ("Next-token cross-entropy, mean over all labels that are not -100. A document must see itself only. Labels are shifted in the loss. "
         "Position embeddings beyond the longest document have no gradient.")

class Att(nn.Module):
    """one attention layer; `allowed` [rows, query, key] says who may look at whom"""
    def __init__(self, vocab=31, width=16, positions=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(positions, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, position_ids, allowed):
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        s = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        s = s.masked_fill(~allowed, -1e9)
        return self.head(x + s.softmax(-1) @ v)

def make(seed):
    torch.manual_seed(seed)
    rows = []
    for lens in ((5, 7, 3), (4, 4, 6)):
        ids = torch.randint(1, 31, (16,)); seg = torch.zeros(16, dtype=torch.long); pos = torch.zeros(16, dtype=torch.long)
        lab = torch.full((16,), -100); a = 0
        for k, n in enumerate(lens):
            seg[a:a + n] = k + 1; pos[a:a + n] = torch.arange(n); lab[a + 1:a + n] = ids[a + 1:a + n]; a += n
        ids[a:] = 0
        rows.append((ids, seg, pos, lab))
    ids, seg, pos, lab = (torch.stack(x) for x in zip(*rows))
    return {"model": Att(), "ids": ids, "attention_mask": seg, "position_ids": pos, "labels": lab}

def ce(logits, labels):
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), ignore_index=-100)

def causal(n):
    return torch.tril(torch.ones(n, n, dtype=torch.bool))[None]

def broken(model, batch):
    keep = batch["attention_mask"].bool()
    allowed = causal(keep.shape[1]) & keep[:, None, :]
    return ce(model(batch["ids"], batch["position_ids"], allowed), batch["labels"])

def right(model, batch):
    seg = batch["attention_mask"]
    allowed = causal(seg.shape[1]) & (seg[:, None, :] == seg[:, :, None])
    return ce(model(batch["ids"], batch["position_ids"], allowed), batch["labels"])

if __name__ == "__main__":
    b = make(0); m = b.pop("model")
    tot = n = 0
    for r in range(2):
        for k in (1, 2, 3):
            i = b["ids"][r][b["attention_mask"][r] == k][None]; T = i.shape[1]
            lp = F.cross_entropy(m(i, torch.arange(T)[None], causal(T))[0, :-1], i[0, 1:], reduction="sum"); tot += lp; n += T - 1
    print("broken", broken(m, b).item(), "right", right(m, b).item(), "document by document", (tot / n).item())
    assert torch.allclose(right(m, b), tot / n, atol=1e-5) and (broken(m, b) - tot / n).abs() > 1e-4
