"""Best-fit-decreasing packing ("Fewer Truncations Improve Language Modeling", Ding et al. 2024; TRL strategy bfd). A long document is cut into full pieces first and only its tail is packed; the rows come out in another order and number, with no token lost or doubled."""
import bisect
FAMILY = "packing"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with doc (id) and ids (list of tokens, any positive length)"}
SETTINGS = {"capacity": "row length, 16"}
NOTES = "Output rows: ids and pieces = list of (doc, offset, length). Rows are shorter than the capacity where nothing fits (padded later). Deterministic: ties keep input order. Pieces of one document may stand in different rows, later piece in an earlier row."
def make(seed):
    import random
    r = random.Random(seed)
    return {"rows": [{"doc": i, "ids": [r.randint(1, 49) for _ in range(r.choice([2, 3, 5, 7, 11, 16, 21, 37]))]} for i in range(25)]}

def right(rows, capacity=16):
    pieces = [(r["doc"], o, r["ids"][o:o + capacity]) for r in rows for o in range(0, len(r["ids"]), capacity)]
    pieces.sort(key=lambda p: -len(p[2]))                        # stable
    bins, free = [], []                                          # free: sorted (space, bin)
    for doc, off, ids in pieces:
        i = bisect.bisect_left(free, (len(ids), -1))             # the tightest bin that holds it
        if i == len(free):
            space, b = capacity, len(bins); bins.append({"ids": [], "pieces": []})
        else:
            space, b = free.pop(i)
        bins[b]["ids"] += ids; bins[b]["pieces"].append((doc, off, len(ids)))
        if space > len(ids):
            bisect.insort(free, (space - len(ids), b))
    return bins

if __name__ == "__main__":
    rows = make(0)["rows"]; out = right(rows)
    back = {}
    for b in out:
        at = 0
        assert 0 < len(b["ids"]) <= 16
        for doc, off, n in b["pieces"]:
            back.setdefault(doc, {})[off] = b["ids"][at:at + n]; at += n
        assert at == len(b["ids"])
    for r in rows:
        assert sum((back[r["doc"]][o] for o in sorted(back[r["doc"]])), []) == r["ids"]
        assert len(back[r["doc"]]) == -(-len(r["ids"]) // 16)    # never more cuts than needed
    total = sum(len(r["ids"]) for r in rows); print(len(rows), "documents ->", len(out), "rows, lower bound", -(-total // 16)); assert len(out) <= -(-total // 16) * 11 / 9 + 1
