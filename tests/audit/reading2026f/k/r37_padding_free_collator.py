"""Padding-free collator (transformers DataCollatorWithFlattening). All rows become ONE row of shape [1, total]; there is no attention mask, position ids
start again at 0 (the attention kernel finds the borders from them), and the first label of each document is -100, since the shifted loss would cross the border."""
import torch

FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of dicts with input_ids and labels (lists of equal length, labels -100 where not trained)"}
SETTINGS = {}
NOTES = ("Labels are NOT shifted here (the model shifts inside), so the first label of a document belongs to the last token of the previous one and is masked. "
         "cu_seqlens has rows + 1 entries. Works for any number of rows; order kept.")


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for n in torch.randint(2, 8, (4,), generator=g).tolist():
        ids = torch.randint(1, 50, (n,), generator=g).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * (n // 3) + ids[n // 3:]})
    return {"rows": rows}


def right(rows):
    ids, labels, pos, ends = [], [], [], [0]
    for row in rows:
        ids += row["input_ids"]
        labels += [-100] + list(row["labels"][1:])
        pos += range(len(row["input_ids"]))
        ends.append(len(ids))
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels]), "position_ids": torch.tensor([pos]),
            "cu_seqlens": torch.tensor(ends, dtype=torch.int32), "max_length": torch.tensor(max(b - a for a, b in zip(ends, ends[1:])))}


if __name__ == "__main__":
    for seed in range(4):
        rows = make(seed)["rows"]; out = right(rows)
        pairs = lambda ids, labels: [(ids[t], labels[t + 1]) for t in range(len(ids) - 1) if labels[t + 1] != -100]
        flat = pairs(out["input_ids"][0].tolist(), out["labels"][0].tolist())
        assert flat == [p for r in rows for p in pairs(r["input_ids"], r["labels"])]          # the same trained pairs as row by row
        assert (out["position_ids"][0] == 0).nonzero().flatten().tolist() == out["cu_seqlens"][:-1].tolist()
    print(out)
