"""Best-fit packing. Rows are sorted by length and put into the fullest bin that still has room, so the order of the documents is lost and bins hold documents side by side; only documents longer than the window are cut. Ding et al. 2024, "Fewer truncations improve language modeling"."""
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of {'id': unique number, 'ids': non-empty list of token ids}"}
SETTINGS = {"window": "largest number of tokens of a bin, 16"}
NOTES = ("Out: list of {'ids', 'segments', 'sources'}: tokens of the bin, segment number per token (from 1), the (id, offset) of each piece. Every token appears exactly once, none is dropped or repeated. Deterministic (ties by id). "
         "Bins are not padded and mostly shorter than the window. Fewer rows come out than go in. Order of rows is not kept: shuffle the bins afterwards.")


def right(rows, window=16):
    pieces = [(r["id"], o, r["ids"][o:o + window]) for r in rows for o in range(0, len(r["ids"]), window)]
    pieces.sort(key=lambda p: (-len(p[2]), p[0], p[1]))
    bins = []
    for p in pieces:
        fit = [b for b in bins if b["room"] >= len(p[2])]
        if fit:
            b = min(fit, key=lambda b: b["room"])
        else:
            b = {"room": window, "pieces": []}
            bins.append(b)
        b["room"] -= len(p[2])
        b["pieces"].append(p)
    return [{"ids": [t for p in b["pieces"] for t in p[2]],
             "segments": [k for k, p in enumerate(b["pieces"], 1) for _ in p[2]],
             "sources": [(p[0], p[1]) for p in b["pieces"]]} for b in bins]


def make(seed):
    import random
    rng = random.Random(seed)
    return {"rows": [{"id": i, "ids": [rng.randrange(50) for _ in range(rng.randint(1, 40 if i % 7 == 0 else 14))]} for i in range(60)]}


if __name__ == "__main__":
    for seed in range(10):
        rows = make(seed)["rows"]
        out = right(rows)
        back = {r["id"]: [None] * len(r["ids"]) for r in rows}
        for b in out:
            assert 0 < len(b["ids"]) <= 16 and len(b["segments"]) == len(b["ids"])
            for k, (i, o) in enumerate(b["sources"], 1):
                part = [t for t, s in zip(b["ids"], b["segments"]) if s == k]
                assert back[i][o:o + len(part)] == [None] * len(part)
                back[i][o:o + len(part)] = part
        assert all(back[r["id"]] == r["ids"] for r in rows)
        cuts = [s for b in out for s in b["sources"]]
        assert all(sum(i == r["id"] for i, _ in cuts) == -(-len(r["ids"]) // 16) for r in rows)
    tokens = sum(len(r["ids"]) for r in rows)
    print("rows", len(rows), "bins", len(out), "least possible", -(-tokens // 16), "full share", tokens / 16 / len(out))
