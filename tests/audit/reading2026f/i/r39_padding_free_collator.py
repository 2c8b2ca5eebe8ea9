"""Padding-free collator (transformers DataCollatorWithFlattening). All rows become ONE row; position ids restart at 0 for every document, the first token of each document
has the label -100 because its predecessor belongs to another document, and the boundaries go to cu_seqlens."""
FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of {'ids': list of ints, 'labels': list of ints (unshifted, -100 where not trained)}"}
SETTINGS = {}
NOTES = "Labels are unshifted (the model shifts them). No attention mask is returned: position ids and cu_seqlens carry the boundaries. Batch size of the result is 1 whatever the number of rows. No token is dropped, one label per document is."
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for n in (5, 1, 7, 3):
        ids = torch.randint(1, 50, (n,), generator=g).tolist()
        rows.append({"ids": ids, "labels": [-100 if k < n // 3 else t for k, t in enumerate(ids)]})
    return {"rows": rows}


def right(rows):
    lengths = torch.tensor([len(r["ids"]) for r in rows])
    ends = lengths.cumsum(0)
    cu = torch.cat([torch.zeros(1, dtype=torch.int32), ends.to(torch.int32)])
    labels = torch.tensor([t for r in rows for t in r["labels"]])
    labels[cu[:-1].long()] = -100
    pos = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends - lengths, lengths)
    return {"input_ids": torch.tensor([t for r in rows for t in r["ids"]])[None], "labels": labels[None], "position_ids": pos[None],
            "cu_seqlens": cu, "max_seqlen": lengths.max()}


if __name__ == "__main__":
    d = make(0); out = right(d["rows"]); at = 0
    for r in d["rows"]:
        for k, t in enumerate(r["ids"]):
            assert out["input_ids"][0, at] == t and out["position_ids"][0, at] == k
            assert out["labels"][0, at] == (-100 if k == 0 else r["labels"][k]); at += 1
    assert out["cu_seqlens"].tolist() == [0, 5, 6, 13, 16] and at == out["input_ids"].shape[1] == 16
    print("ok", out["labels"])
