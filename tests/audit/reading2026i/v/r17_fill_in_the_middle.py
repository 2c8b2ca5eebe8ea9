"""Fill in the middle, with the odd SPM order. Bavarian et al. 2022 (arXiv 2207.14255): with probability 0.5 a document is cut
at two random places and reordered, half of the time as PSM (<pre> prefix <suf> suffix <mid> middle) and half as SPM. The
joint SPM form is <pre> <suf> suffix <mid> prefix middle: the prefix stands after <mid>. Every token is trained."""
import random

FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of {'ids': token ids in 5..49, 'key': number of the row}"}
SETTINGS = {"fim_rate": "share of reordered rows, 0.5", "spm_rate": "share of SPM among them, 0.5", "seed": "seed, 0"}
NOTES = ("Special ids: <pre> 1, <mid> 2, <suf> 3, end 4. Reordered rows are 3 tokens longer. Rows that are not reordered are "
         "unchanged but for the end id. Pieces may be empty. Random choices depend on seed and key only. All tokens are "
         "trained (labels = ids), also the prefix.")

PRE, MID, SUF, EOT = 1, 2, 3, 4


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"ids": [r.randrange(5, 50) for _ in range(r.randrange(4, 14))], "key": k} for k in range(12)], "fim_rate": 0.5,
            "spm_rate": 0.5, "seed": seed}


def right(rows, fim_rate=0.5, spm_rate=0.5, seed=0):
    out = []
    for row in rows:
        r = random.Random(f"fim-{seed}-{row['key']}")
        ids = row["ids"]
        if r.random() < fim_rate:
            a, b = sorted(r.randint(0, len(ids)) for _ in range(2))
            prefix, middle, suffix = ids[:a], ids[a:b], ids[b:]
            if r.random() < spm_rate:
                ids = [PRE, SUF] + suffix + [MID] + prefix + middle
            else:
                ids = [PRE] + prefix + [SUF] + suffix + [MID] + middle
        out.append({"ids": ids + [EOT], "labels": ids + [EOT], "key": row["key"]})
    return out


if __name__ == "__main__":
    d = make(0)
    out, kinds = right(**d), []
    for row, o in zip(d["rows"], out):
        x = o["ids"][:-1]
        if x[0] != PRE:
            kinds.append("plain")
            assert x == row["ids"]
        elif x[1] == SUF and x.index(MID) + 1 + len(x[x.index(MID) + 1:]) == len(x) and x[x.index(MID) + 1:] + x[2:x.index(MID)] == row["ids"]:
            kinds.append("spm")
        else:
            kinds.append("psm")
            s, m = x.index(SUF), x.index(MID)
            assert x[1:s] + x[m + 1:] + x[s + 1:m] == row["ids"]
    print(kinds, out[kinds.index("spm")], sep="\n")
    assert {"plain", "spm", "psm"} <= set(kinds)
