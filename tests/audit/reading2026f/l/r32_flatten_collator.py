"""Padding-free collator (transformers DataCollatorWithFlattening). The batch is ONE row with all documents end to end, no attention mask; positions start again
at zero, the first label of every document is -100 (else the previous document would predict it), and boundaries are int32 cumulative lengths."""
FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of dicts with input_ids (list of int) and labels (list of int, -100 where not trained), same length, not empty"}
SETTINGS = {}
NOTES = ("Output: input_ids, position_ids and labels of shape [1, total], cu_seqlens of shape [rows + 1] (int32) and max_length (int tensor). Labels are NOT shifted here; "
         "the model shifts. Nothing is padded or cut; the order of documents is kept.")
import random

import torch


def make(seed):
    r = random.Random(seed)
    rows = []
    for _ in range(r.randint(2, 5)):
        n = r.randint(1, 8)
        ids = [r.randint(1, 40) for _ in range(n)]
        cut = r.randint(0, n)
        rows.append({"input_ids": ids, "labels": [-100] * cut + ids[cut:]})
    return {"rows": rows}


def right(rows):
    ids, pos, labels, ends = [], [], [], [0]
    for row in rows:
        ids += row["input_ids"]
        pos += range(len(row["input_ids"]))
        labels += [-100] + list(row["labels"][1:])
        ends.append(len(ids))
    return {"input_ids": torch.tensor([ids]), "position_ids": torch.tensor([pos]), "labels": torch.tensor([labels]),
            "cu_seqlens": torch.tensor(ends, dtype=torch.int32),
            "max_length": torch.tensor(max(b - a for a, b in zip(ends, ends[1:])))}


if __name__ == "__main__":
    for seed in range(20):
        rows = make(seed)["rows"]
        out = right(rows)
        cu = out["cu_seqlens"].tolist()
        for row, a, b in zip(rows, cu, cu[1:]):
            assert out["input_ids"][0, a:b].tolist() == row["input_ids"]
            assert out["labels"][0, a:b].tolist()[1:] == row["labels"][1:] and out["labels"][0, a] == -100
            assert out["position_ids"][0, a:b].tolist() == list(range(b - a))
        # what a shifting model trains equals what separate rows would train
        trained = int((out["labels"][0, 1:] != -100).sum())
        assert trained == sum(sum(x != -100 for x in r["labels"][1:]) for r in rows)
    print(rows, "\n", out)
