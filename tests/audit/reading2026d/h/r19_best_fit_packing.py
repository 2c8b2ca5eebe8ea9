"""Best-fit-decreasing packing: rows are reordered by length, each goes into the fullest bin it fits in; only over-long rows are cut, into whole chunks (Ding et al. 2024, 'Fewer truncations'). No separator is added, segment ids mark the rows."""
FAMILY = "packing"; KIND = "data stage"
INPUTS = {"rows": "list of dict ids (non-empty list)"}
SETTINGS = {"size": "bin capacity, 16"}
NOTES = "Order of rows is not kept, by design. No token lost or doubled. Each bin at most size tokens. Chunks of an over-long row are separate segments."
import random
def make(seed):
    r = random.Random(seed); return {"rows": [{"ids": [r.randrange(2, 50) for _ in range(r.randrange(1, 40 if i == 0 else 14))]} for i in range(20)]}
def right(rows, size=16):
    parts = [r["ids"][i:i + size] for r in rows for i in range(0, len(r["ids"]), size)]
    bins = []
    for p in sorted(parts, key=len, reverse=True):
        fit = [b for b in bins if len(b["ids"]) + len(p) <= size]
        b = max(fit, key=lambda b: len(b["ids"])) if fit else None
        if b is None: b = {"ids": [], "seg": []}; bins.append(b)
        k = b["seg"][-1] + 1 if b["seg"] else 0
        b["ids"] += p; b["seg"] += [k] * len(p)
    return bins
if __name__ == "__main__":
    rows = make(0)["rows"]; o = right(rows); tot = sum(len(r["ids"]) for r in rows)
    assert sorted(t for r in rows for t in r["ids"]) == sorted(t for b in o for t in b["ids"]) and all(len(b["ids"]) == len(b["seg"]) <= 16 for b in o)
    got = sorted(tuple(t for t, s in zip(b["ids"], b["seg"]) if s == k) for b in o for k in set(b["seg"]))
    assert got == sorted(tuple(r["ids"][i:i + 16]) for r in rows for i in range(0, len(r["ids"]), 16))
    print("bins", len(o), "lower bound", -(-tot // 16)); assert len(o) <= -(-tot // 16) + 1
