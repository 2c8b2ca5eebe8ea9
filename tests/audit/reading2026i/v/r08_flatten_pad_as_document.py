"""Flattened batch whose padding is a document of its own. Padding-free collators (transformers'
DataCollatorWithFlattening and its relatives) concatenate the rows, set each row's first label to -100 because the model
shifts over the whole row, and pad up to a multiple. The padding becomes one more sequence in cu_seqlens with its own
positions from 0, so that real tokens never see it; there is no attention mask."""
import random
import torch

FAMILY = "packing and positions"
KIND = "collator"
INPUTS = {"rows": "list of {'input_ids', 'labels'}, labels aligned with input_ids, -100 where not trained"}
SETTINGS = {"multiple": "total length is a multiple of it, 8", "pad_id": "padding id, 0"}
NOTES = ("Output [1, total]; labels are aligned with the inputs (the model shifts), -100 at the first token of each row "
         "and on padding. position_ids restart at each row and at the padding. cu_seqlens has an extra entry for the "
         "padding if there is any. The output's number of rows is 1 for any number of input rows.")


def make(seed):
    r = random.Random(seed)
    rows = []
    for _ in range(4):
        n = r.randrange(2, 9)
        ids = [r.randrange(1, 50) for _ in range(n)]
        rows.append({"input_ids": ids, "labels": [-100] * (n // 3) + ids[n // 3:]})
    return {"rows": rows, "multiple": 8, "pad_id": 0}


def right(rows, multiple=8, pad_id=0):
    ids, labels, positions, cu = [], [], [], [0]
    for row in rows:
        ids += row["input_ids"]
        labels += [-100] + row["labels"][1:]
        positions += range(len(row["input_ids"]))
        cu.append(len(ids))
    extra = -len(ids) % multiple
    if extra:
        ids += [pad_id] * extra
        labels += [-100] * extra
        positions += range(extra)
        cu.append(len(ids))
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels]), "position_ids": torch.tensor([positions]),
            "cu_seqlens": torch.tensor(cu, dtype=torch.int32), "max_seqlen": torch.tensor(max(b - a for a, b in zip(cu, cu[1:])))}


if __name__ == "__main__":
    d = make(0)
    out = right(**d)
    print({k: v.tolist() for k, v in out.items()})
    assert out["input_ids"].shape[1] % 8 == 0
    wanted = [y for row in d["rows"] for y in row["labels"][1:] if y != -100]
    assert out["labels"][out["labels"] != -100].tolist() == wanted
    assert (out["position_ids"][0, out["cu_seqlens"][:-1].long()] == 0).all()
