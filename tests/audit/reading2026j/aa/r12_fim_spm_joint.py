"""Fill in the middle (Bavarian et al. 2022), PSM and the joint SPM variant: in SPM the order is PRE SUF suffix MID prefix middle, so the prefix stands AFTER the
middle token and no token closes it. It looks like lost or misplaced markers; it is what the paper trains, so that PSM and SPM share the form 'PRE .. SUF .. MID ..'."""
FAMILY = "data stages and collators"
KIND = "data stage"
INPUTS = {"rows": "list of dicts: 'ids' (list of token ids of one document, below 40), 'index' (number of the document)"}
SETTINGS = {"rate": "share of transformed documents, 0.5", "spm": "share of SPM among them, 0.5", "seed": "0"}
NOTES = ("Same number and order of rows. Random by (seed, index) alone. Every row ends in EOT; transformed rows are 4 tokens longer, others 1. All tokens are trained, prefix and suffix as well (no mask, as in the paper). "
         "Cuts are uniform over positions, so any of the three parts may be empty. Document level: before packing. Input ids are not changed in place.")
import random

PRE, SUF, MID, EOT = 40, 41, 42, 43


def right(rows, rate=0.5, spm=0.5, seed=0):
    out = []
    for row in rows:
        ids = list(row["ids"])
        r = random.Random("fim/%d/%d" % (seed, row["index"]))
        if r.random() < rate:
            a, b = sorted((r.randint(0, len(ids)), r.randint(0, len(ids))))
            pre, mid, suf = ids[:a], ids[a:b], ids[b:]
            if r.random() < spm:
                ids = [PRE, SUF] + suf + [MID] + pre + mid
            else:
                ids = [PRE] + pre + [SUF] + suf + [MID] + mid
        out.append({**row, "ids": ids + [EOT]})
    return out


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"ids": [r.randrange(40) for _ in range(r.randint(0, 12))], "index": 1000 * seed + k} for k in range(8)]}


def _back(ids):
    assert ids[-1] == EOT
    ids = ids[:-1]
    if not ids or ids[0] != PRE:
        return ids, "plain"
    s, m = ids.index(SUF), ids.index(MID)
    # PSM: pre | suf | mid; SPM has nothing between PRE and SUF and prefix + middle after MID: one rule inverts both
    return ids[1:s] + ids[m + 1:] + ids[s + 1:m], "spm" if s == 1 else "psm"


if __name__ == "__main__":
    kinds = {}
    for seed in range(300):
        rows = make(seed)["rows"]
        copy = [list(r["ids"]) for r in rows]
        out = right(rows)
        assert [r["index"] for r in out] == [r["index"] for r in rows] and [r["ids"] for r in rows] == copy
        for a, b in zip(rows, out):
            back, kind = _back(b["ids"])
            assert back == a["ids"]
            assert len(b["ids"]) == len(a["ids"]) + (1 if kind == "plain" else 4)
            if len(a["ids"]) > 5:
                kinds[kind] = kinds.get(kind, 0) + 1
            assert right([a])[0] == b
    n = sum(kinds.values())
    assert abs(kinds["plain"] / n - 0.5) < 0.05
    print("ok", {k: round(v / n, 3) for k, v in kinds.items()}, "(spm counts PSM with an empty prefix too)")
