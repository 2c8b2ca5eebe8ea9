"""Temperature sampling of languages. The stage repeats rows of small languages and drops rows of big ones, while the total stays the same: quotas follow n^0.3 (XLM-R, mT5), rounded by largest remainder. A rotating start by epoch brings the dropped rows in later."""
import random
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of rows {'index': int, 'lang': str, 'ids': list of token ids}"}
SETTINGS = {"alpha": "exponent of the counts, 0.3", "epoch": "number of the pass, rotates the rows taken, 0"}
NOTES = "Rows out = rows in, but with repeats and omissions on purpose; within a language the copies of any two rows differ by at most one. Deterministic, no draws; grouped by language in order of first appearance (a shuffle comes later). Depends on the whole list. Rows unchanged."
def make(seed):
    r = random.Random(seed)
    langs = ["en"] * 60 + ["de"] * 15 + ["sw"] * 4 + ["yo"] * 2
    r.shuffle(langs)
    return {"rows": [{"index": i, "lang": l, "ids": [r.randrange(1, 50) for _ in range(5)]} for i, l in enumerate(langs)]}
def right(rows, alpha=0.3, epoch=0):
    by = {}
    for row in rows:
        by.setdefault(row["lang"], []).append(row)
    total = sum(len(v) ** alpha for v in by.values())
    share = {l: len(rows) * len(v) ** alpha / total for l, v in by.items()}
    quota = {l: int(s) for l, s in share.items()}
    rest = len(rows) - sum(quota.values())
    for l in sorted(by, key=lambda l: (quota[l] - share[l], l))[:rest]:
        quota[l] += 1
    return [by[l][(epoch * quota[l] + k) % len(by[l])] for l in by for k in range(quota[l])]
if __name__ == "__main__":
    from collections import Counter
    for seed in range(10):
        rows = make(seed)["rows"]
        seen = Counter()
        for e in range(6):
            got = right(rows, epoch=e)
            assert len(got) == len(rows)
            n = Counter(g["lang"] for g in got)
            z = sum(c ** 0.3 for c in (60, 15, 4, 2))
            assert all(abs(n[l] - 81 * c ** 0.3 / z) < 1 for l, c in (("en", 60), ("de", 15), ("sw", 4), ("yo", 2)))
            seen.update(g["index"] for g in got)
            for l in n:
                c = Counter(g["index"] for g in got if g["lang"] == l)
                k = [c[r["index"]] for r in rows if r["lang"] == l]
                assert max(k) - min(k) <= 1
        assert all(seen[i] > 0 for i in range(81))
    print("ok", dict(n), "from 60/15/4/2; all rows seen after 6 passes")
