"""Padding at the end of a packed row is a document of its own. The flattening collator puts all rows in one line and fills it up to a multiple of eight with tokens whose positions start at 0 again, so that
kernels that find documents by position see one more document. Labels are not shifted (the model shifts), and the first token of every document has the label -100, since it would be predicted from another document."""
import random
import torch

FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "rows with input_ids and completion_mask (1 = trained)"}
SETTINGS = {"multiple": "total length is rounded up to a multiple of 8", "pad": "filler id 0"}
NOTES = "One line of all rows in order, no attention mask; position_ids 0,1,2,... inside each row and again in the filler. labels = input_ids where completion_mask is 1, except at the first token of a row, and -100 elsewhere; not shifted."


def make(seed):
    r = random.Random(seed)
    rows = []
    for _ in range(4):
        n, p = r.randrange(3, 8), r.randrange(0, 3)
        rows.append({"input_ids": [r.randrange(1, 40) for _ in range(n)], "completion_mask": [0] * p + [1] * (n - p)})
    return {"rows": rows}


def right(rows, multiple=8, pad=0):
    ids, labels, pos = [], [], []
    for row in rows:
        x, m = row["input_ids"], row["completion_mask"]
        ids += x
        labels += [-100] + [t if k else -100 for t, k in zip(x[1:], m[1:])]
        pos += range(len(x))
    fill = -len(ids) % multiple
    return {"input_ids": torch.tensor([ids + [pad] * fill]), "labels": torch.tensor([labels + [-100] * fill]), "position_ids": torch.tensor([pos + list(range(fill))])}


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    targets = [(row["input_ids"][t - 1], row["input_ids"][t]) for row in rows for t in range(1, len(row["input_ids"])) if row["completion_mask"][t]]
    got = [(out["input_ids"][0, t].item(), out["labels"][0, t + 1].item()) for t in range(out["labels"].shape[1] - 1) if out["labels"][0, t + 1] != -100]
    print(out["position_ids"].tolist(), len(got), "trained")
    assert got == targets and out["input_ids"].shape[1] % 8 == 0
