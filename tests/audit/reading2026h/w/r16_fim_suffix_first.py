"""Fill-in-the-middle with the suffix first: <PRE> <SUF> suffix <MID> prefix middle <EOT>.
Bavarian et al. 2022 (arXiv 2207.14255), the SPM form that is trained jointly with PSM. The prefix sentinel is empty-handed at the front, and prefix and middle follow <MID> with no mark between them; that is how the paper does it.
Half of the documents are left as they are. The order of text in a row is not that of the file, and the cut is at a random character (here token), also inside words."""
import random

FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of {ids: list of token ids 10..49, index: number of the document}"}
SETTINGS = {"fim_rate": "share of rearranged documents, 0.5", "spm_rate": "share of SPM among them, 0.5 (the rest PSM)"}
NOTES = "Each document keeps all its tokens, once each; sentinels 1 <PRE>, 2 <SUF>, 3 <MID>, 4 <EOT>. Every row ends in <EOT>. Deterministic in index. Parts may be empty. All tokens are trained, the sentinels too."

PRE, SUF, MID, EOT = 1, 2, 3, 4


def make(seed):
    rng = random.Random(seed)
    return {"rows": [{"ids": [rng.randint(10, 49) for _ in range(rng.randint(3, 15))], "index": i} for i in range(24)]}


def right(rows, fim_rate=0.5, spm_rate=0.5):
    out = []
    for row in rows:
        rng = random.Random(7919 * row["index"] + 1)
        ids = row["ids"]
        if rng.random() >= fim_rate:
            new = ids + [EOT]
        else:
            a, b = sorted(rng.randint(0, len(ids)) for _ in range(2))
            prefix, middle, suffix = ids[:a], ids[a:b], ids[b:]
            if rng.random() < spm_rate:
                new = [PRE, SUF] + suffix + [MID] + prefix + middle + [EOT]
            else:
                new = [PRE] + prefix + [SUF] + suffix + [MID] + middle + [EOT]
        out.append({"ids": new, "index": row["index"]})
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]; out = right(rows)
    kinds = {"plain": 0, "psm": 0, "spm": 0}
    for r, o in zip(rows, out):
        x = o["ids"]; assert x[-1] == EOT; x = x[:-1]
        if x[0] != PRE:
            kinds["plain"] += 1; back = x
        else:
            s, m = x.index(SUF), x.index(MID)
            prefix, suffix, rest = x[1:s], x[s + 1:m], x[m + 1:]
            kinds["spm" if s == 1 and len(suffix) < len(r["ids"]) and rest + suffix == r["ids"] else "psm"] += 1
            back = prefix + rest + suffix                   # both forms restore the document
        assert back == r["ids"]
    print("rows", len(rows), kinds)
    assert right(rows[::-1])[::-1] == out and min(kinds.values()) > 0
