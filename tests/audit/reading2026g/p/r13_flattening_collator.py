"""Padding-free flattening. All rows become ONE row of the batch, without padding and without attention mask; position ids restart at 0 and tell the attention kernel where rows begin, and the first label of each row is -100 although it is a real token (HF DataCollatorWithFlattening)."""
import random
import torch
FAMILY = "data stages"
KIND = "collator"
INPUTS = {"rows": "list of rows {'ids': list of token ids, 'labels': list of the same length, -100 where not trained}"}
SETTINGS = {}
NOTES = "Output batch size is always 1; the number of rows is len(cu_seqlens)-1. labels are not shifted here (the model shifts): -100 on the first token of each row keeps the last token of the row before from predicting it, and loses nothing, since a first token has no predecessor. cu_seqlens is int32 as flash attention wants, and has one more entry than rows."
def make(seed):
    r = random.Random(seed)
    rows = []
    for _ in range(4):
        ids = [r.randrange(1, 50) for _ in range(r.randrange(2, 12))]
        k = r.randrange(0, len(ids) - 1)
        rows.append({"ids": ids, "labels": [-100] * k + ids[k:]})
    return {"rows": rows}
def right(rows):
    ids, labels, position, ends = [], [], [], [0]
    for row in rows:
        ids += row["ids"]
        labels += [-100] + row["labels"][1:]
        position += range(len(row["ids"]))
        ends.append(len(ids))
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels]), "position_ids": torch.tensor([position]),
            "cu_seqlens": torch.tensor(ends, dtype=torch.int32)}
if __name__ == "__main__":
    import torch.nn.functional as F
    for seed in range(10):
        rows = make(seed)["rows"]
        b = right(rows)
        assert b["input_ids"].shape[0] == 1 and (b["position_ids"] == 0).sum() == len(rows)
        torch.manual_seed(seed)
        emb, pos, head = torch.nn.Embedding(50, 16), torch.nn.Embedding(16, 16), torch.nn.Linear(16, 50)
        def model(ids, p):      # causal mean inside a row, found from the positions alone
            h = emb(ids) + pos(p)
            seg = (p == 0).cumsum(0)
            m = ((seg[:, None] == seg[None]) & (torch.arange(len(ids))[:, None] >= torch.arange(len(ids))[None])).float()
            return head(m / m.sum(1, keepdim=True) @ h)
        logits = model(b["input_ids"][0], b["position_ids"][0])
        flat = F.cross_entropy(logits[:-1], b["labels"][0, 1:], ignore_index=-100, reduction="sum")
        slow = 0.0
        for row in rows:
            x, y = torch.tensor(row["ids"]), torch.tensor(row["labels"])
            slow = slow + F.cross_entropy(model(x, torch.arange(len(x)))[:-1], y[1:], ignore_index=-100, reduction="sum")
        assert torch.allclose(flat, slow, atol=1e-4)
        flat.backward(); assert emb.weight.grad.abs().sum() > 0
    print("ok", b["cu_seqlens"].tolist(), flat.item(), slow.item())
