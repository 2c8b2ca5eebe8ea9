"""Best-fit-decreasing packing. Documents leave in another order than they came, longest first, and rows come out with different fill; only documents longer than a row are cut. It is 'Fewer Truncations' (Ding et al. 2024), which avoids the needless cuts of concatenate-and-chunk."""
import bisect
import random
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of documents {'ids': list of token ids, any length >= 1}"}
SETTINGS = {"capacity": "tokens per packed row, 32"}
NOTES = "Needs the whole list at once; the output depends on all documents (not row-wise). Every token appears exactly once, none is dropped or padded. 'lengths' gives the pieces of a row, in order, for the attention mask and positions. Deterministic; ties keep the input order. Number of rows out differs from rows in."
def make(seed):
    r = random.Random(seed)
    return {"rows": [{"ids": [r.randrange(1, 50) for _ in range(r.choice([3, 7, 12, 20, 31, 45, 80]))]} for _ in range(25)]}
def right(rows, capacity=32):
    pieces = [row["ids"][i:i + capacity] for row in rows for i in range(0, len(row["ids"]), capacity)]
    pieces.sort(key=len, reverse=True)
    bins, free = [], []                       # free: sorted (space left, bin number)
    for piece in pieces:
        at = bisect.bisect_left(free, (len(piece), -1))
        if at == len(free):
            bins.append([]); number, space = len(bins) - 1, capacity
        else:
            space, number = free.pop(at)
        bins[number].append(piece)
        if space > len(piece):
            bisect.insort(free, (space - len(piece), number))
    return [{"ids": sum(b, []), "lengths": [len(p) for p in b]} for b in bins]
if __name__ == "__main__":
    for seed in range(20):
        rows = make(seed)["rows"]
        got = right(rows)
        want = sorted(tuple(r["ids"][i:i + 32]) for r in rows for i in range(0, len(r["ids"]), 32))
        have = []
        for g in got:
            at = 0
            assert sum(g["lengths"]) == len(g["ids"]) <= 32
            for n in g["lengths"]:
                have.append(tuple(g["ids"][at:at + n])); at += n
        assert sorted(have) == want
        slow = []                              # explicit best fit
        for p in sorted(want, key=len, reverse=True):
            fits = [b for b in slow if sum(b) + len(p) <= 32]
            (max(fits, key=sum) if fits else slow.append([]) or slow[-1]).append(len(p))
        assert len(slow) == len(got)
        lower = -(-sum(len(r["ids"]) for r in rows) // 32)
    print("ok", len(rows), "documents ->", len(got), "rows, lower bound", lower)
