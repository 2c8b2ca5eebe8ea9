"""Padding-free collator: the whole batch becomes one row of shape [1, total] (transformers' DataCollatorWithFlattening). No attention mask is returned: the borders are in position_ids and cu_seqlens; the first label of each sample is -100, because the shifted loss would otherwise predict it from the sample before."""
FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of dicts with input_ids (list) and optionally labels (list, -100 untrained)"}
SETTINGS = {}
NOTES = "Batch dimension is always 1; number of input rows is free (>= 1), empty rows are not allowed. labels are NOT shifted (the loss shifts). cu_seqlens is int32 with rows + 1 entries. The rows are not changed."
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
    rows = []
    for n in torch.randint(1, 9, (5,), generator=g).tolist():
        ids = torch.randint(1, 32, (n,), generator=g).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * (n // 3) + ids[n // 3:]})
    return {"rows": rows}


def right(rows):
    ids, labels, pos, cu = [], [], [], [0]
    for r in rows:
        x = list(r["input_ids"])
        ids += x
        labels += [-100] + list(r.get("labels", x))[1:]
        pos += range(len(x))
        cu.append(len(ids))
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels]), "position_ids": torch.tensor([pos]),
            "cu_seqlens": torch.tensor(cu, dtype=torch.int32), "max_length": torch.tensor(max(len(r["input_ids"]) for r in rows))}


if __name__ == "__main__":
    b = make(0)
    out = right(**b)
    torch.manual_seed(0)
    m = TinyLM()
    doc = (out["position_ids"] == 0).cumsum(1)
    mask = (doc[:, :, None] == doc[:, None, :]) & torch.ones(doc.shape[1], doc.shape[1], dtype=torch.bool).tril()
    logits = m(out["input_ids"], out["position_ids"], mask)
    loss = nn.functional.cross_entropy(logits[0, :-1], out["labels"][0, 1:], reduction="sum", ignore_index=-100)
    loss.backward()
    ref = 0.0
    for r in b["rows"]:
        if len(r["input_ids"]) > 1:
            lg = m(torch.tensor([r["input_ids"]]))
            ref += nn.functional.cross_entropy(lg[0, :-1], torch.tensor(r["labels"][1:]), reduction="sum", ignore_index=-100).item()
    print(out["cu_seqlens"].tolist(), loss.item(), ref, "grad", m.head.weight.grad.norm().item())
    assert abs(loss.item() - ref) < 1e-3
