"""Fill in the middle (Bavarian et al. 2022). Half of the documents are cut at two random places and REORDERED prefix-suffix-middle; half of those use the SPM variant, where prefix
and middle stand together after both sentinels. The order of the text is broken on purpose, no token is lost; the coin depends on the document's own id, not on the order of the rows."""
FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of {'id': int, 'ids': list of ints below 40}"}
SETTINGS = {"rate": "share of documents transformed, 0.5", "spm": "share of these in SPM form, 0.5"}
NOTES = "Sentinels: 40 prefix, 41 suffix, 42 middle, 43 end. Every output row has all tokens of its input row (a permutation) plus sentinels, and trains on all of them. SPM as in the paper: PRE SUF suffix MID prefix middle. Deterministic per document id; rows keep their order. Number of rows unchanged."
import random
PRE, SUF, MID, END = 40, 41, 42, 43


def make(seed):
    rnd = random.Random(seed)
    return {"rows": [{"id": 100 * seed + i, "ids": [rnd.randrange(40) for _ in range(rnd.randrange(3, 12))]} for i in range(16)]}


def right(rows, rate=0.5, spm=0.5):
    out = []
    for row in rows:
        rnd, ids = random.Random(f"fim-{row['id']}"), row["ids"]
        if rnd.random() < rate:
            a, b = sorted(rnd.randrange(len(ids) + 1) for _ in range(2))
            p, m, s = ids[:a], ids[a:b], ids[b:]
            ids = [PRE, SUF, *s, MID, *p, *m, END] if rnd.random() < spm else [PRE, *p, SUF, *s, MID, *m, END]
        else:
            ids = [*ids, END]
        out.append({**row, "ids": ids})
    return out


if __name__ == "__main__":
    kinds = {"plain": 0, "psm": 0, "spm": 0}
    for seed in range(20):
        d = make(seed); out = right(d["rows"])
        assert out[::-1] == right(d["rows"][::-1])                      # the order of rows does not matter
        for r, o in zip(d["rows"], out):
            t = o["ids"]; assert sorted(x for x in t if x < 40) == sorted(r["ids"]) and t[-1] == END
            if t[0] != PRE:
                kinds["plain"] += 1; assert t[:-1] == r["ids"]; continue
            i, j = t.index(SUF), t.index(MID)
            if i == 1 and r["ids"] == t[j + 1:-1] + t[2:j]: kinds["spm"] += 1
            else: kinds["psm"] += 1; assert t[1:i] + t[j + 1:-1] + t[i + 1:j] == r["ids"]
    print("ok", kinds)
