"""Padding-free collator: all documents in ONE row, labels unshifted, first label of each document ignored. TRL DataCollatorForLanguageModeling(padding_free=True), transformers DataCollatorWithFlattening.
No attention mask is returned; documents are told apart by position ids that restart at 0. labels[position_ids == 0] = -100 removes the target that the shift in the model would pair with the last token of the document before. The batch dimension of the output is 1 whatever the number of rows."""
import torch
FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of {input_ids: list, completion_mask: list of 0/1}"}
SETTINGS = {}
NOTES = "Output: input_ids, position_ids, labels, each [1, total]. labels are aligned with input_ids (the model shifts). -100 at prompt tokens and at the first token of each document. No padding, no truncation; the order of rows is kept."

def make(seed):
    g = torch.Generator().manual_seed(seed); rows = []
    for n in (5, 3, 7, 1):
        rows.append({"input_ids": torch.randint(1, 31, (n,), generator=g).tolist(), "completion_mask": [0] * (n // 3) + [1] * (n - n // 3)})
    return {"rows": rows}

def right(rows):
    ids = torch.tensor([t for r in rows for t in r["input_ids"]])[None]
    pos = torch.cat([torch.arange(len(r["input_ids"])) for r in rows])[None]
    mask = torch.tensor([t for r in rows for t in r["completion_mask"]])[None]
    labels = ids.masked_fill(mask == 0, -100)
    labels[pos == 0] = -100
    return {"input_ids": ids, "position_ids": pos, "labels": labels}

if __name__ == "__main__":
    rows = make(0)["rows"]; out = right(rows)
    pairs = [(out["input_ids"][0, t].item(), out["labels"][0, t + 1].item()) for t in range(out["labels"].shape[1] - 1) if out["labels"][0, t + 1] != -100]
    ref = [(r["input_ids"][k], r["input_ids"][k + 1]) for r in rows for k in range(len(r["input_ids"]) - 1) if r["completion_mask"][k + 1]]
    print(len(pairs), "targets; all inside their documents:", pairs == ref)
    assert pairs == ref and out["input_ids"].shape == (1, 16)
