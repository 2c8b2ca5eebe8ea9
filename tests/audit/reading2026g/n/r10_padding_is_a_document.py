"""Padding-free collator (HF DataCollatorWithFlattening, Transformer Engine THD). The whole batch becomes one row without an attention mask; the fill to a multiple of 8 is a document of its own with its own cu_seqlens entry, so real tokens never see it; the first label of each document is -100."""
import torch
FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of dicts with input_ids (list) and labels (list, -100 where untrained)"}
SETTINGS = {"multiple": "length of the row is a multiple of 8"}
NOTES = "Batch dimension is always 1. cu_seqlens int32 starts with 0 and ends with the padded length. Labels are unshifted (the model shifts). seq_idx of the fill is one more than that of the last row. No fill entry if the length already fits. Number of trained labels may fall by one per row (the first token can never be predicted)."
PAD = 0
def make(seed):
    g = torch.Generator().manual_seed(seed); rows = []
    for n in (5, 9, 3, 6):
        ids = torch.randint(1, 50, (n,), generator=g).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * (n // 3) + ids[n // 3:]})
    return {"rows": rows}

def right(rows, multiple=8):
    ids, labels, pos, seq, cu = [], [], [], [], [0]
    for i, r in enumerate(rows):
        n = len(r["input_ids"])
        ids += r["input_ids"]; labels += [-100] + r["labels"][1:]
        pos += range(n); seq += [i] * n; cu.append(cu[-1] + n)
    fill = -len(ids) % multiple
    if fill:
        ids += [PAD] * fill; labels += [-100] * fill; pos += range(fill); seq += [len(rows)] * fill; cu.append(cu[-1] + fill)
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels]), "position_ids": torch.tensor([pos]),
            "seq_idx": torch.tensor([seq], dtype=torch.int32), "cu_seqlens": torch.tensor(cu, dtype=torch.int32),
            "max_seqlen": max(b - a for a, b in zip(cu, cu[1:]))}

if __name__ == "__main__":
    rows = make(0)["rows"]; out = right(rows)
    assert out["input_ids"].shape == (1, 24) and out["cu_seqlens"].tolist() == [0, 5, 14, 17, 23, 24]
    for i, r in enumerate(rows):
        a, b = out["cu_seqlens"][i:i + 2].tolist()
        assert out["input_ids"][0, a:b].tolist() == r["input_ids"] and out["labels"][0, a:b].tolist() == [-100] + r["labels"][1:]
        assert out["position_ids"][0, a:b].tolist() == list(range(b - a))
    assert out["labels"][0, 23] == -100 and out["max_seqlen"] == 9
    assert right(rows[:1] + rows[2:3])["cu_seqlens"].tolist() == [0, 5, 8]; print(out["cu_seqlens"], out["labels"])
