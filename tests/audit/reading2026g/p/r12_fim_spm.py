"""Fill-in-the-middle, variant SPM. Half of the documents are cut into prefix, middle, suffix and rewritten as PRE SUF suffix MID prefix middle: PRE is followed directly by SUF and the prefix comes after MID. This odd order is the one of Bavarian et al. 2022 and StarCoder, and all tokens stay trained."""
import random
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of rows {'index': int, 'ids': list of token ids 10..49}"}
SETTINGS = {"rate": "share of documents transformed, 0.5", "spm": "share of the transformed in SPM order, the rest in PSM, 0.5", "pre": "id 1", "mid": "id 2", "suf": "id 3", "eod": "id 0", "seed": "0"}
NOTES = "Row-wise by seed and index. Tokens are permuted, never lost; three special tokens are added to the transformed rows, EOD to all. Prefix, middle or suffix may be empty. Trained on every token, specials included: no mask. Order of rows kept."
def make(seed):
    r = random.Random(seed)
    return {"rows": [{"index": i, "ids": [r.randrange(10, 50) for _ in range(r.randrange(1, 40))]} for i in range(12)]}
def right(rows, rate=0.5, spm=0.5, pre=1, mid=2, suf=3, eod=0, seed=0):
    out = []
    for row in rows:
        r, ids = random.Random(f"{seed}/{row['index']}"), row["ids"]
        if r.random() < rate:
            a, b = sorted((r.randint(0, len(ids)), r.randint(0, len(ids))))
            p, m, s = ids[:a], ids[a:b], ids[b:]
            if r.random() < spm:
                ids = [pre, suf] + s + [mid] + p + m
            else:
                ids = [pre] + p + [suf] + s + [mid] + m
        out.append({"index": row["index"], "ids": list(ids) + [eod]})
    return out
if __name__ == "__main__":
    kinds = {"plain": 0, "psm": 0, "spm": 0}
    for seed in range(40):
        rows = make(seed)["rows"]
        for row, g in zip(rows, right(rows, seed=seed)):
            x = g["ids"]; assert x[-1] == 0; x = x[:-1]
            if x[0] != 1:
                kinds["plain"] += 1; assert x == row["ids"]; continue
            i, j = x.index(3), x.index(2)
            p, s, m = x[1:i], x[i + 1:j], x[j + 1:]
            assert p + m + s == row["ids"]          # one formula undoes both orders: in SPM p is empty
            kinds["psm" if p else "spm"] += 1
    assert abs(kinds["plain"] / 480 - 0.5) < 0.08 and kinds["spm"] > 60
    print("ok", kinds)
