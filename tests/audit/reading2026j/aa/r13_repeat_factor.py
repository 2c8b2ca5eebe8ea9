"""Repeat factor sampling (LVIS, Gupta et al. 2019; detectron2): an epoch holds some rows several times on purpose. A row repeats max over its categories of max(1, sqrt(t / f)),
with the fraction rounded at random anew in each epoch, so that the length of the epoch varies as well."""
FAMILY = "data stages and collators"
KIND = "data stage"
INPUTS = {"rows": "list of dicts: 'id', 'labels' (list of categories in the row, may be empty, may repeat)"}
SETTINGS = {"t": "frequency below which a category is repeated, 0.3", "epoch": "0; seeds rounding and order"}
NOTES = ("Duplicates are wanted; no row is ever lost (factor at least 1). f is the share of rows that hold the category at least once (not of labels), computed over all rows: the stage needs the whole data set at once, not shards. "
         "Rows without labels have factor 1. Square root, not proportional. The output is shuffled. The rows are the same objects, not copies.")
import math
import random
from collections import Counter


def factors(rows, t):
    f = Counter(c for row in rows for c in set(row["labels"]))
    rep = {c: max(1.0, math.sqrt(t * len(rows) / n)) for c, n in f.items()}
    return [max((rep[c] for c in row["labels"]), default=1.0) for row in rows]


def right(rows, t=0.3, epoch=0):
    r = random.Random("rfs/%d" % epoch)
    out = []
    for row, k in zip(rows, factors(rows, t)):
        whole = math.floor(k)
        out += [row] * (whole + (r.random() < k - whole))
    r.shuffle(out)
    return out


def make(seed):
    r = random.Random(seed)
    cats = "aaaaabbbccd"
    return {"rows": [{"id": i, "labels": [r.choice(cats + "e" * (i == 0)) for _ in range(r.randint(0, 3))]} for i in range(40)]}


if __name__ == "__main__":
    for seed in range(3):
        rows = make(seed)["rows"]
        want = []
        for row in rows:
            best = 1.0
            for c in row["labels"]:
                share = sum(c in other["labels"] for other in rows) / len(rows)
                best = max(best, (0.3 / share) ** 0.5)
            want.append(best)
        epochs, sizes, n = 3000, set(), Counter()
        for e in range(epochs):
            out = right(rows, epoch=e)
            sizes.add(len(out))
            here = Counter(row["id"] for row in out)
            assert all(math.floor(w) <= here[i] <= math.ceil(w) for i, w in enumerate(want))
            n.update(here)
        gap = max(abs(n[i] / epochs - w) for i, w in enumerate(want))
        assert gap < 0.05 and len(sizes) > 1
        assert right(rows, epoch=5) == right(rows, epoch=5)
    print("ok mean repeats match; largest gap", round(gap, 4), "factors", sorted({round(w, 2) for w in want}), "epoch sizes", min(sizes), max(sizes))
