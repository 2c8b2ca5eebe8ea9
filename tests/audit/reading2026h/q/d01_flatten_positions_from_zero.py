"""Flattening collator numbers positions from 0 for a RoBERTa-like model. huggingface/transformers#47496 (fix in PR #47525), https://github.com/huggingface/transformers/issues/47496, 2026.
DataCollatorWithFlattening wrote position_ids as range(len(input_ids)). RoBERTa-family models compute positions from padding_idx + 1 (usually 2) when none are passed, so the packed rows used other position embeddings than the same rows unpacked (position 1 is the padding row).
Nothing fails; outputs are silently worse. The fix adds position_ids_start and finds boundaries by the minimum position."""
import torch
FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of row dicts with input_ids (list of token ids, no padding)"}
SETTINGS = {}
NOTES = "All rows are joined into one row [1, total]. labels: the first token of each document is -100 (the model shifts internally). The model is RoBERTa-like: pad id 1, learned position embeddings, numbering starts at padding_idx + 1 = 2 in every document; position 1 belongs to padding and 0 is never used. Any number of rows."
PAD_ID = 1


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for n in (5, 3, 7):
        rows.append({"input_ids": torch.randint(3, 40, (n,), generator=g).tolist()})
    return {"rows": rows}


def broken(rows):
    ids, labels, pos = [], [], []
    for r in rows:
        x = r["input_ids"]
        ids += x
        labels += [-100] + x[1:]
        pos += list(range(len(x)))
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels]), "position_ids": torch.tensor([pos])}


def right(rows):
    start = PAD_ID + 1
    ids, labels, pos = [], [], []
    for r in rows:
        x = r["input_ids"]
        ids += x
        labels += [-100] + x[1:]
        pos += list(range(start, start + len(x)))
    return {"input_ids": torch.tensor([ids]), "labels": torch.tensor([labels]), "position_ids": torch.tensor([pos])}


def unpacked_positions(ids):          # what the model itself does when no positions are passed
    m = ids.ne(PAD_ID).int()
    return (m.cumsum(1) * m).long() + PAD_ID


if __name__ == "__main__":
    rows = make(0)["rows"]
    want = torch.cat([unpacked_positions(torch.tensor([r["input_ids"]])) for r in rows], 1)
    b, r = broken(rows), right(rows)
    print("broken", b["position_ids"].tolist()); print("right ", r["position_ids"].tolist())
    assert torch.equal(r["position_ids"], want) and not torch.equal(b["position_ids"], want)
