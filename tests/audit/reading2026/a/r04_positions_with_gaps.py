"""Packed documents whose positions jump on purpose (positional skip-wise training).
To train for a longer context than the rows are, each document is cut into two chunks, and the second chunk starts after a
random gap; the positions stay strictly increasing and below the target length, and inside a chunk they are consecutive.
They do not reach from 0 to n-1, and the largest position is beyond the length of the row. Documents are told apart by
document_ids, not by positions."""
import random
import torch
FAMILY = "packing"
KIND = "collator"
INPUTS = {"rows": "list of packed rows: 'documents' = list of id lists, 'seed' = seed of the gaps of this row"}
SETTINGS = {"target_length": "context length that is simulated, 64", "pad_id": "padding id, 0"}
NOTES = ("Returns ids, labels (not shifted, -100 on padding and on the first token of a document), position_ids, document_ids "
         "(-1 on padding). Gaps in the positions are intended.")

def make(seed):
    g = torch.Generator().manual_seed(seed)
    doc = lambda n: torch.randint(5, 40, (n,), generator=g).tolist()
    return {"rows": [{"documents": [doc(7), doc(9)], "seed": 10 + seed}, {"documents": [doc(6), doc(4), doc(5)], "seed": 11 + seed}]}

def right(rows, target_length=64, pad_id=0):
    width = max(sum(map(len, r["documents"])) for r in rows)
    out = {"ids": [], "labels": [], "position_ids": [], "document_ids": []}
    for row in rows:
        rng = random.Random(row["seed"])
        ids, labels, pos, docs = [], [], [], []
        for d, doc in enumerate(row["documents"]):
            cut = rng.randrange(1, len(doc))
            gap = rng.randrange(0, target_length - len(doc) + 1)
            ids += doc
            labels += [-100] + doc[1:]
            pos += list(range(cut)) + [i + gap for i in range(cut, len(doc))]
            docs += [d] * len(doc)
        pad = width - len(ids)
        for key, value, fill in (("ids", ids, pad_id), ("labels", labels, -100), ("position_ids", pos, 0), ("document_ids", docs, -1)):
            out[key].append(value + [fill] * pad)
    return {k: torch.tensor(v) for k, v in out.items()}

if __name__ == "__main__":
    out = right(**make(0))
    for r, row in enumerate(make(0)["rows"]):
        start = 0
        for doc in row["documents"]:
            p = out["position_ids"][r, start:start + len(doc)]
            steps = p.diff()
            assert p[0] == 0 and (steps >= 1).all() and int((steps > 1).sum()) <= 1 and p.max() < 64
            start += len(doc)
    print(out["position_ids"].tolist())
