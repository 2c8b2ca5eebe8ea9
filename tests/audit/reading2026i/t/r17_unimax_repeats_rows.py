"""UniMax mixture: rows of small sources are repeated on purpose, up to a cap. Chung et al. 2023 (arXiv 2304.09151).
The budget is shared as evenly as possible over sources; a small source is repeated at most max_epochs times, and what it cannot use goes to the larger ones. So duplicates appear, large sources are read in part only, and the row counts of the output differ from those of the input."""
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of {source, text}"}
SETTINGS = {"budget": "rows of the mixture, 40", "max_epochs": "most often a row may appear, 3"}
NOTES = "Output: rows of the mixture, sources one after the other in order of size (shuffling comes later). Within a source whole passes first, then the first rows of the next pass. A row never appears more than max_epochs times. If all sources are capped the output is shorter than the budget."

def make(seed):
    rows = []
    for s, n in (("a", 3 + seed), ("b", 8), ("c", 50)):
        rows += [{"source": s, "text": f"{s}{i}"} for i in range(n)]
    return {"rows": rows}

def right(rows, budget=40, max_epochs=3):
    by = {}
    for r in rows:
        by.setdefault(r["source"], []).append(r)
    left, out = budget, []
    names = sorted(by, key=lambda s: len(by[s]))
    for k, s in enumerate(names):
        share = left // (len(names) - k)
        take = min(share, max_epochs * len(by[s]))
        out += [by[s][i % len(by[s])] for i in range(take)]
        left -= take
    return out

if __name__ == "__main__":
    from collections import Counter
    out = right(make(0)["rows"]); src = Counter(r["source"] for r in out); rep = Counter(r["text"] for r in out)
    print(dict(src), "most repeats", max(rep.values()))
    assert src == {"a": 9, "b": 15, "c": 16} and len(out) == 40 and max(rep.values()) == 3 and all(rep[f"a{i}"] == 3 for i in range(3))
