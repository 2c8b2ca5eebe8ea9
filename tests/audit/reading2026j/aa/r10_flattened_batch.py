"""Padding-free collator (DataCollatorWithFlattening of transformers): the whole batch becomes ONE row, without padding and without attention_mask.
Restarting position_ids mark the documents, and the label of each document's first token is -100, since the shift would let the previous document predict it."""
FAMILY = "data stages and collators"
KIND = "collator"
INPUTS = {"rows": "list of dicts with 'input_ids' (list of ints, at least one) and optionally 'labels' (same length, -100 = not trained)"}
SETTINGS = {}
NOTES = ("Output has batch size 1: input_ids, labels, position_ids [1, total], cu_seq_lens [rows + 1] int32, max_length (a Python int). Labels are unshifted; the model shifts. "
         "The attention must be block diagonal, derived from position_ids or cu_seq_lens. A document of one token trains nothing. Trained tokens = sum of (length - 1) without given labels.")
import random
import torch
from torch import nn
import torch.nn.functional as F


def right(rows):
    ids, labels, pos, ends = [], [], [], [0]
    for row in rows:
        x = list(row["input_ids"])
        y = list(row.get("labels", x))
        if len(x) == 0 or len(x) != len(y):
            raise ValueError("empty row or labels of another length")
        ids += x
        labels += [-100] + y[1:]
        pos += range(len(x))
        ends.append(len(ids))
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels]), "position_ids": torch.tensor([pos]),
            "cu_seq_lens": torch.tensor(ends, dtype=torch.int32), "max_length": max(b - a for a, b in zip(ends, ends[1:]))}


def make(seed):
    r = random.Random(seed)
    rows = []
    for k in range(5):
        x = [r.randint(1, 30) for _ in range(r.randint(1, 9))]
        rows.append({"input_ids": x})
        if k % 2:
            rows[-1]["labels"] = [t if r.random() < 0.6 else -100 for t in x]
    return {"rows": rows}


class TinyAttention(nn.Module):                     # only for the check below
    def __init__(self, vocab=31, width=16):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, width), nn.Embedding(16, width)
        self.qkv, self.head = nn.Linear(width, 3 * width), nn.Linear(width, vocab)

    def forward(self, ids, position_ids):
        doc = (position_ids == 0).cumsum(1)
        x = self.emb(ids) + self.pos(position_ids)
        q, k, v = self.qkv(x).chunk(3, -1)
        n = ids.shape[1]
        allow = (doc[:, :, None] == doc[:, None, :]) & torch.ones(n, n, dtype=torch.bool).tril()
        return self.head(x + F.scaled_dot_product_attention(q, k, v, attn_mask=allow))


if __name__ == "__main__":
    for seed in range(8):
        rows = make(seed)["rows"]
        b = right(rows)
        torch.manual_seed(seed)
        model = TinyAttention()
        logits = model(b["input_ids"], b["position_ids"])
        loss = F.cross_entropy(logits[0, :-1], b["labels"][0, 1:], ignore_index=-100)
        total, n = 0.0, 0
        for row in rows:                            # each document alone
            x = torch.tensor([row["input_ids"]])
            y = torch.tensor(row.get("labels", row["input_ids"]))[1:]
            own = model(x, torch.arange(x.shape[1])[None])[0, :-1]
            total = total + F.cross_entropy(own, y, ignore_index=-100, reduction="sum")
            n += int((y != -100).sum())
        assert n == int((b["labels"][0, 1:] != -100).sum())
        assert torch.allclose(loss, total / n, atol=1e-5)
        loss.backward()
        assert model.qkv.weight.grad.abs().sum() > 0
        assert b["cu_seq_lens"].diff().tolist() == [len(r["input_ids"]) for r in rows]
    print("ok", loss.item(), n, "trained of", b["input_ids"].shape[1])
