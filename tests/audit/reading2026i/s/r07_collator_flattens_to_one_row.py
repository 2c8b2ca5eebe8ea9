"""Padding-free collator (transformers DataCollatorWithFlattening, ms-swift padding_free): all examples become ONE row, there is no attention mask and no padding, positions restart at 0, and the label of the first token of each example is -100 although
it is a real token (the model shifts by one, and without this the last token of the previous example would be trained to predict it). cu_seqlens and max_length go along for varlen attention."""
import torch

FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of {'input_ids': ids, 'labels': ids or -100, same length, not shifted}"}
SETTINGS = {}
NOTES = "Output: input_ids, labels, position_ids each [1, total]; cu_seqlens int32 [examples + 1]; max_length. Labels are not shifted. The batch dimension of the output is always 1, whatever the number of rows."


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for n, prompt in ((5, 2), (8, 0), (3, 1), (6, 4)):
        ids = torch.randint(0, 50, (n,), generator=g).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return {"rows": rows}


def right(rows):
    ids, labels, positions, ends = [], [], [], [0]
    for row in rows:
        ids += row["input_ids"]
        labels += [-100] + row["labels"][1:]
        positions += range(len(row["input_ids"]))
        ends.append(len(ids))
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels]), "position_ids": torch.tensor([positions]),
            "cu_seqlens": torch.tensor(ends, dtype=torch.int32), "max_length": torch.tensor(max(len(r["input_ids"]) for r in rows))}


if __name__ == "__main__":
    d = make(0)
    out = right(**d)
    pairs = [(out["input_ids"][0, i].item(), out["labels"][0, i + 1].item()) for i in range(out["labels"].shape[1] - 1) if out["labels"][0, i + 1] != -100]
    want = [(r["input_ids"][i], r["labels"][i + 1]) for r in d["rows"] for i in range(len(r["labels"]) - 1) if r["labels"][i + 1] != -100]
    print("targets", len(pairs), "explicit", len(want), "shape", tuple(out["input_ids"].shape))
    assert pairs == want
    assert out["position_ids"].flatten().tolist() == [i for r in d["rows"] for i in range(len(r["input_ids"]))]
