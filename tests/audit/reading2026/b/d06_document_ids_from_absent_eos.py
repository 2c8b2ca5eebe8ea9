"""Packed chat rows find document borders by EOS, but EOS is cut off the inputs. pytorch/torchtitan#3130,
https://github.com/pytorch/torchtitan/issues/3130, 2026.
Each sample is cut to inputs = tokens[:-1], labels = tokens[1:], so its final EOS lives only in the labels. The packer concatenates the inputs and
the document mask counts EOS tokens in the inputs: there are none, all samples become one document and attend to each other."""
import random
import torch

FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of dicts: tokens (prompt, answer, final EOS), prompt_len"}
SETTINGS = {"eos": "id of the end token, 1"}
NOTES = ("Greedy pack of all rows into one sequence: input_ids, labels (prompt -100), positions (restart in each sample) and document_ids for a "
         "block-diagonal causal mask. One document for each row.")
IGNORE = -100


def _cut(row):
    t, p = row["tokens"], row["prompt_len"]
    return t[:-1], [IGNORE] * (p - 1) + t[p:]


def broken(rows, eos=1):
    ids, labels, pos = [], [], []
    for r in rows:
        x, y = _cut(r)
        ids += x
        labels += y
        pos += list(range(len(x)))
    ids = torch.tensor(ids)
    ends = (ids == eos).long()
    doc = ends.cumsum(0) - ends
    return {"input_ids": ids, "labels": torch.tensor(labels), "positions": torch.tensor(pos), "document_ids": doc}


def right(rows, eos=1):
    ids, labels, pos = [], [], []
    for r in rows:
        x, y = _cut(r)
        ids += x
        labels += y
        pos += list(range(len(x)))
    pos = torch.tensor(pos)
    doc = (pos == 0).long().cumsum(0) - 1
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), "positions": pos, "document_ids": doc}


def make(seed):
    r = random.Random(seed)
    rows = []
    for _ in range(4):
        p, a = r.randint(2, 5), r.randint(2, 6)
        rows.append({"tokens": [r.randrange(2, 50) for _ in range(p + a)] + [1], "prompt_len": p})
    return {"rows": rows}


if __name__ == "__main__":
    x = make(0)
    a, b = broken(**x), right(**x)
    print("broken documents", a["document_ids"].tolist())
    print("right  documents", b["document_ids"].tolist())
    assert len(b["input_ids"]) == len(b["labels"]) and int(b["document_ids"].max()) + 1 == len(x["rows"])
    assert not torch.equal(a["document_ids"], b["document_ids"])
