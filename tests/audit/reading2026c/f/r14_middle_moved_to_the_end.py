"""Right: fill in the middle. Half of the rows have their middle cut out and moved behind the suffix, in one of two orders, so the tokens of a row are not in reading order. The choice depends on a hash of the row, not on a random state, so it is the same in every epoch and on every rank."""
import random
import zlib

FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "documents {ids: token ids of 10 or higher}"}
SETTINGS = {"rate": "share of rows that are rearranged, 0.5", "spm_rate": "share of those in suffix-prefix-middle order, 0.5"}
NOTES = ("Prefix-suffix-middle: PRE prefix SUF suffix MID middle EOT; suffix-prefix-middle (the joint variant): PRE SUF suffix MID prefix middle EOT. Other rows: ids EOT. All tokens are trained, as usual for this objective. Same number of rows and the same content tokens as before.")
PRE, SUF, MID, EOT = 1, 2, 3, 4

def make(seed):
    r = random.Random(seed)
    return {"rows": [{"ids": [r.randint(10, 49) for _ in range(r.randint(6, 14))]} for _ in range(40)]}

def right(rows, rate=0.5, spm_rate=0.5):
    out = []
    for row in rows:
        ids = row["ids"]
        r = random.Random(zlib.crc32(bytes(ids)))
        if r.random() >= rate:
            out.append({"ids": ids + [EOT]})
            continue
        a, b = sorted(r.sample(range(len(ids) + 1), 2))
        prefix, middle, suffix = ids[:a], ids[a:b], ids[b:]
        if r.random() < spm_rate:
            out.append({"ids": [PRE, SUF] + suffix + [MID] + prefix + middle + [EOT]})
        else:
            out.append({"ids": [PRE] + prefix + [SUF] + suffix + [MID] + middle + [EOT]})
    return out

def undo(ids):
    ids = ids[:-1]
    if ids[0] != PRE:
        return ids
    suf, mid = ids.index(SUF), ids.index(MID)
    if suf == 1:  # suffix first; a PSM row with an empty prefix reads the same
        return ids[mid + 1:] + ids[suf + 1:mid]
    return ids[1:suf] + ids[mid + 1:] + ids[suf + 1:mid]

if __name__ == "__main__":
    made = make(0)
    out = right(**made)
    moved = sum(r["ids"][0] == PRE for r in out)
    print("rows", len(out), "rearranged", moved, "suffix first", sum(r["ids"][:2] == [PRE, SUF] for r in out))
    assert [undo(r["ids"]) for r in out] == [r["ids"] for r in made["rows"]]
    assert right(list(reversed(made["rows"]))) == list(reversed(out)) and 10 < moved < 30
