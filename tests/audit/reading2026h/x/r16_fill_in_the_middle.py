"""Fill in the middle: documents are cut and put together in another order (Bavarian et al., arXiv 2207.14255; StarCoder, Megatron).
With a rate of one half a document becomes prefix mark, prefix, suffix mark, suffix, middle mark, middle (PSM) or, half of these, the SPM form: prefix mark, suffix mark, suffix, middle mark, prefix, middle.
All tokens are trained, also the marks and the prefix. Parts may be empty. The text is out of order and longer by three marks, on purpose."""
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with ids (document, ids of 10 or more)"}
SETTINGS = {"rate": "share of documents that are changed, 0.5", "spm": "share of the SPM form among these, 0.5", "seed": "seed, 0"}
NOTES = ("Ids 1, 2, 3 are the prefix, suffix and middle marks, 0 the end mark put after each document. Same number of rows in the same order. No token of the document is lost. "
         "The draw of a row depends on seed and row number only.")
import random
import torch

PRE, SUF, MID, END = 1, 2, 3, 0


def make(seed):
    g = torch.Generator().manual_seed(seed)
    return {"rows": [{"ids": torch.randint(10, 48, (int(n),), generator=g).tolist()} for n in torch.randint(1, 12, (12,), generator=g)]}


def right(rows, rate=0.5, spm=0.5, seed=0):
    out = []
    for i, row in enumerate(rows):
        rng = random.Random(seed * 1000003 + i)
        ids = row["ids"]
        if rng.random() < rate:
            a, b = sorted((rng.randint(0, len(ids)), rng.randint(0, len(ids))))
            prefix, middle, suffix = ids[:a], ids[a:b], ids[b:]
            if rng.random() < spm:
                ids = [PRE, SUF] + suffix + [MID] + prefix + middle
            else:
                ids = [PRE] + prefix + [SUF] + suffix + [MID] + middle
        out.append({"ids": ids + [END]})
    return out


def undo(ids):
    ids = ids[:-1]
    if not ids or ids[0] != PRE:
        return ids
    s, m = ids.index(SUF), ids.index(MID)
    if s == 1:                                   # SPM, or PSM with an empty prefix: the same layout
        return ids[m + 1:] + ids[2:m]
    return ids[1:s] + ids[m + 1:] + ids[s + 1:m]


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    changed = sum(o["ids"][0] == PRE for o in out)
    print(changed, "of", len(rows), "documents changed")
    assert 0 < changed < len(rows) and all(undo(o["ids"]) == r["ids"] for o, r in zip(out, rows))
