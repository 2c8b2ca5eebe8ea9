"""A collator for static shapes. Time is rounded up to a multiple of 8 and the rows to a fixed number: missing rows are
copies of the first one with all labels at -100 and one visible token (a fully hidden row would give NaN in attention). The
filler id is a legal token, not a pad id. A loss that sums over labels and divides by their number does not notice."""
FAMILY = "data"
KIND = "collator"
INPUTS = {"rows": "list of dicts with ids and labels (lists of the same length; -100 = not trained); at most max_rows of them"}
SETTINGS = {"max_rows": "rows of the batch, 6", "multiple": "time is a multiple of this, 8", "fill": "id put into padding places, 1"}
NOTES = ("Returns ids, labels, attention_mask of fixed shape [max_rows, time]. Right-padded. Filler rows and padding have label "
         "-100. weights is 1 for real rows and 0 for filler rows.")
import random

import torch


def make(seed):
    rng = random.Random(seed)
    rows = []
    for n in (5, 11, 7, 9):
        ids = [rng.randrange(2, 30) for _ in range(n)]
        rows.append({"ids": ids, "labels": [-100, -100] + ids[2:]})
    return {"rows": rows}


def right(rows, max_rows=6, multiple=8, fill=1):
    time = -(-max(len(r["ids"]) for r in rows) // multiple) * multiple
    out = {k: [] for k in ("ids", "labels", "attention_mask", "weights")}
    for i in range(max_rows):
        row = rows[i] if i < len(rows) else rows[0]
        real = i < len(rows)
        pad = time - len(row["ids"])
        out["ids"].append(row["ids"] + [fill] * pad)
        out["labels"].append((row["labels"] if real else [-100] * len(row["labels"])) + [-100] * pad)
        seen = len(row["ids"]) if real else 1
        out["attention_mask"].append([1] * seen + [0] * (time - seen))
        out["weights"].append(float(real))
    return {k: torch.tensor(v) for k, v in out.items()}


if __name__ == "__main__":
    data = make(0)
    batch = right(**data)
    print({k: tuple(v.shape) for k, v in batch.items()}, "trained", (batch["labels"] != -100).sum().item())
    assert batch["ids"].shape == (6, 16)
    assert (batch["labels"] != -100).sum().item() == sum(sum(x != -100 for x in r["labels"]) for r in data["rows"])
    for i, r in enumerate(data["rows"]):
        assert batch["ids"][i][batch["attention_mask"][i].bool()].tolist() == r["ids"]
        assert [x for x in batch["labels"][i].tolist() if x != -100] == r["labels"][2:]
    assert batch["weights"].sum().item() == 4 and batch["attention_mask"].sum(1).min() >= 1
