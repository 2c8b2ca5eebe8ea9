"""Best-fit-decreasing packing: rows come out in another order, and bins are not full. Ding et al. 2024 "Fewer truncations improve language modeling"; TRL packing strategy "bfd".
Documents are sorted by length, each goes to the fullest bin that still has room. No document is cut unless it is longer than the bin, in which case it is split first and its pieces are placed as separate documents (bfd_split). The number of rows falls; tokens are all kept."""
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of {input_ids: list of ids}"}
SETTINGS = {"seq_length": "tokens per bin, 10"}
NOTES = "Output rows: {input_ids, seq_lengths}. Each token appears exactly once; order of documents is not kept and need not be. seq_lengths sum to the length of the row. Ties: the earlier document first, the earlier bin first. Deterministic."

def make(seed):
    import random
    r = random.Random(seed)
    return {"rows": [{"input_ids": [100 * i + k for k in range(r.choice([2, 3, 4, 5, 7, 9, 23]))]} for i in range(9)]}

def right(rows, seq_length=10):
    pieces = [r["input_ids"][a:a + seq_length] for r in rows for a in range(0, len(r["input_ids"]), seq_length)]
    pieces.sort(key=len, reverse=True)                # stable
    bins = []
    for p in pieces:
        fit = [b for b in bins if sum(map(len, b)) + len(p) <= seq_length]
        if fit:
            max(fit, key=lambda b: sum(map(len, b))).append(p)
        else:
            bins.append([p])
    return [{"input_ids": [t for p in b for t in p], "seq_lengths": [len(p) for p in b]} for b in bins]

if __name__ == "__main__":
    for seed in range(20):
        rows = make(seed)["rows"]; out = right(rows)
        assert sorted(t for r in out for t in r["input_ids"]) == sorted(t for r in rows for t in r["input_ids"])
        assert all(len(r["input_ids"]) <= 10 and sum(r["seq_lengths"]) == len(r["input_ids"]) for r in out)
        for r in out:
            a = 0
            for n in r["seq_lengths"]:
                s = r["input_ids"][a:a + n]; a += n
                assert s == list(range(s[0], s[0] + n))
    print(len(make(0)["rows"]), "rows ->", len(right(make(0)["rows"])))
