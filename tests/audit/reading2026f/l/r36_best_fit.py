"""Best-fit-decreasing packing ("Fewer truncations", Ding et al. 2024). Documents are sorted by length, longest first, so the order changes; only those longer than a row are split, and
each piece goes into the fullest row it still fits. Rows are left unfilled rather than cut a document in two."""
FAMILY = "packing"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with ids (list of int, any length, may be empty)"}
SETTINGS = {"capacity": "tokens of a packed row, 16"}
NOTES = ("Output rows: ids (list), lengths (list of the piece lengths in order), at most capacity tokens each. Every token appears exactly once. Empty documents vanish. Order of documents is not kept; "
         "ties keep the input order, so the result is deterministic.")
import random


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"ids": [r.randint(1, 49) for _ in range(r.choice([0, 1, 3, 5, 7, 9, 12, 16, 21, 40]))]} for _ in range(14)]}


def right(rows, capacity=16):
    pieces = [row["ids"][a:a + capacity] for row in rows for a in range(0, len(row["ids"]), capacity)]
    pieces.sort(key=len, reverse=True)
    bins = []
    for piece in pieces:
        fits = [b for b in bins if sum(b["lengths"]) + len(piece) <= capacity]
        if fits:
            best = max(fits, key=lambda b: sum(b["lengths"]))
        else:
            best = {"ids": [], "lengths": []}
            bins.append(best)
        best["ids"] = best["ids"] + piece
        best["lengths"] = best["lengths"] + [len(piece)]
    return bins


if __name__ == "__main__":
    from collections import Counter
    for seed in range(30):
        rows = make(seed)["rows"]
        out = right(rows)
        assert all(len(b["ids"]) == sum(b["lengths"]) <= 16 for b in out)
        assert Counter(x for r in rows for x in r["ids"]) == Counter(x for b in out for x in b["ids"])
        found = Counter()
        for b in out:
            at = 0
            for n in b["lengths"]:
                found[tuple(b["ids"][at:at + n])] += 1
                at += n
        assert all(found[tuple(r["ids"])] > 0 for r in rows if 0 < len(r["ids"]) <= 16)     # no short document is cut
        total = sum(len(r["ids"]) for r in rows)
    print("tokens", total, "rows", len(out), "lower bound", -(-total // 16))
