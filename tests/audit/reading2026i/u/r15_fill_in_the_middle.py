"""Fill-in-the-middle documents (Bavarian et al., arXiv 2207.14255; SantaCoder). Half of the documents are cut at two random places and written as PRE prefix SUF suffix MID middle END, half of those in the SPM order PRE SUF suffix MID prefix middle. The text is out of order and the two orders differ in where markers stand, yet every source token appears exactly once."""
import random

FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of dicts: ids = token ids of a document (4 ..), key = integer of the document"}
SETTINGS = {}
NOTES = "Rate 0.5, SPM rate 0.5, random by the row's key only, so order and batching do not matter. All tokens, markers included, are trained as usual. Rows that are not changed get only END. Number and order of rows stay; rows become longer by up to 4."
PRE, SUF, MID, END = 0, 1, 2, 3


def make(seed):
    rng = random.Random(seed)
    return {"rows": [{"ids": [rng.randint(4, 31) for _ in range(rng.randint(5, 12))], "key": rng.randint(0, 10 ** 6)} for _ in range(12)]}


def right(rows):
    out = []
    for r in rows:
        ids, rng = r["ids"], random.Random(r["key"])
        if rng.random() < 0.5:
            a, b = sorted(rng.randint(0, len(ids)) for _ in range(2))
            pre, mid, suf = ids[:a], ids[a:b], ids[b:]
            if rng.random() < 0.5:
                new = [PRE, SUF] + suf + [MID] + pre + mid + [END]
            else:
                new = [PRE] + pre + [SUF] + suf + [MID] + mid + [END]
        else:
            new = ids + [END]
        out.append(dict(r, ids=new))
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]; out = right(rows); changed = 0
    for r, o in zip(rows, out):
        assert sorted(t for t in o["ids"] if t > 3) == sorted(r["ids"]) and o["ids"][-1] == END
        x = o["ids"][:-1]
        if x[0] == PRE:
            changed += 1
            i, j = x.index(SUF), x.index(MID)
            suf, tail = x[i + 1:j], x[j + 1:]
            assert x[1:i] + tail + suf == r["ids"]
        else:
            assert x == r["ids"]
    print("changed", changed, "of", len(rows)); assert right(rows[::-1]) == out[::-1] and 0 < changed < len(rows)
