"""Fill-in-the-middle: documents are cut and put together in another order. Bavarian et al. 2022 (arXiv 2207.14255); the SPM variant of its section 3.
With probability fim_rate a document becomes PRE prefix SUF suffix MID middle, and with probability 1/2 of these the SPM order PRE SUF suffix MID prefix middle. The tokens are not in reading order, and the loss is on all of them, prefix and suffix too."""
import random
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of {input_ids, index: number of the document in the corpus}"}
SETTINGS = {"fim_rate": "part of documents that are changed, 0.7", "seed": "data seed, 11"}
NOTES = "Output rows: {input_ids, labels}; labels = input_ids (the model shifts). Special ids: PRE 97, SUF 98, MID 99, EOD 0 at the end of each document and never moved. Random choices depend on seed and index only, so the stage gives the same result for any order or sharding of rows. Prefix, middle or suffix may be empty."
PRE, SUF, MID, EOD = 97, 98, 99, 0

def make(seed):
    r = random.Random(seed)
    return {"rows": [{"input_ids": [r.randrange(1, 90) for _ in range(r.randrange(3, 12))] + [EOD], "index": 50 * seed + i} for i in range(12)]}

def right(rows, fim_rate=0.7, seed=11):
    out = []
    for row in rows:
        r = random.Random(seed * 1000003 + row["index"])
        ids, end = row["input_ids"][:-1], row["input_ids"][-1:]
        if r.random() < fim_rate:
            a, b = sorted(r.randint(0, len(ids)) for _ in range(2))
            p, m, s = ids[:a], ids[a:b], ids[b:]
            ids = [PRE, SUF] + s + [MID] + p + m if r.random() < 0.5 else [PRE] + p + [SUF] + s + [MID] + m
        out.append({"input_ids": ids + end, "labels": ids + end})
    return out

def undo(ids):
    ids = ids[:-1]
    if not ids or ids[0] != PRE:
        return ids + [EOD]
    i, j = ids.index(SUF), ids.index(MID)
    return ids[1:i] + ids[j + 1:] + ids[i + 1:j] + [EOD]      # both orders: (prefix) (prefix+)middle suffix

if __name__ == "__main__":
    n = 0
    for seed in range(10):
        rows = make(seed)["rows"]; out = right(rows)
        assert all(undo(o["input_ids"]) == r["input_ids"] and o["labels"] == o["input_ids"] for o, r in zip(out, rows))
        assert right(rows[::-1])[::-1] == out
        n += sum(o["input_ids"][0] == PRE for o in out)
    print("changed", n, "of 120; every document can be put back")
