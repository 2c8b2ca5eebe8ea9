"""Fill-in-the-middle (Bavarian et al., arXiv 2207.14255; StarCoder, DeepSeek-Coder): a document is cut at two random places and written out of order, with probability 1/2 as PSM
<pre> prefix <suf> suffix <mid> middle, otherwise in the SPM form of the paper, <pre> <suf> suffix <mid> prefix middle, where prefix and middle stand together behind <mid>. About half of the
documents stay as they are. The tokens of a row change their order, three tokens are added, the loss runs over all of them; the choice depends on the id of the row only, so
that it does not depend on the order of the rows."""
FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with id (int, unique) and ids (token ids 10 to 39, at least 3)"}
SETTINGS = {"rate": "probability of the transformation, 0.5", "spm_rate": "probability of SPM among the transformed, 0.5", "seed": "seed of the cuts, 0"}
NOTES = ("Rows in, rows out, same order and number, with id and new ids. Per row a generator seeded with (seed, id) decides; rows are independent. Untouched rows end with EOS (2), transformed ones too. "
         "A transformed row holds <pre>=3, <suf>=4, <mid>=5 exactly once each and each token of the document exactly once; putting prefix + middle + suffix together gives the document.")
import random

EOS, PRE, SUF, MID = 2, 3, 4, 5


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"id": 100 * seed + i, "ids": [r.randint(10, 39) for _ in range(r.randint(3, 12))]} for i in range(10)]}


def right(rows, rate=0.5, spm_rate=0.5, seed=0):
    out = []
    for row in rows:
        r = random.Random("%d-%d" % (seed, row["id"]))
        ids = row["ids"]
        if r.random() < rate:
            a, b = sorted(r.randint(0, len(ids)) for _ in range(2))
            prefix, middle, suffix = ids[:a], ids[a:b], ids[b:]
            if r.random() < spm_rate:
                new = [PRE, SUF] + suffix + [MID] + prefix + middle
            else:
                new = [PRE] + prefix + [SUF] + suffix + [MID] + middle
        else:
            new = list(ids)
        out.append({"id": row["id"], "ids": new + [EOS]})
    return out


if __name__ == "__main__":
    n = 0
    for s in range(20):
        x = make(s)
        for a, b in zip(x["rows"], right(**x)):
            t = b["ids"]
            assert a["id"] == b["id"] and t[-1] == EOS
            t = t[:-1]
            if PRE in t:
                n += 1
                i, j = t.index(SUF), t.index(MID)
                prefix, suffix, rest = t[1:i], t[i + 1:j], t[j + 1:]
                assert prefix + rest + suffix == a["ids"]   # PSM; in SPM prefix is empty and rest is prefix + middle
            else:
                assert t == a["ids"]
    print("documents rebuilt; transformed", n, "of 200")
