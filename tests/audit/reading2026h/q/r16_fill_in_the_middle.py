"""Fill-in-the-middle: half of the documents are cut in three and rearranged. Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle"; StarCoder, Megatron-LM's FIM dataset.
The text is out of order and the loss is on all tokens, prefix and suffix included. In the SPM variant the two markers <fim_prefix><fim_suffix> stand together, before the suffix, and the prefix follows <fim_middle> directly without a marker between prefix and middle: this is the paper's variant, not a lost token."""
import random
FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of rows, each a dict with ids (list of token ids below 40) and seed (int of that row)"}
SETTINGS = {"rate": "share of documents rearranged, 0.5", "spm": "share of those in suffix-prefix-middle order, 0.5"}
NOTES = "One output row per input row, in order; ids and labels (equal to ids, unshifted, everything trained). Rearranged rows gain exactly 3 marker tokens. PSM: [PRE] prefix [SUF] suffix [MID] middle. SPM: [PRE] [SUF] suffix [MID] prefix middle. Parts may be empty. Deterministic in the row's seed, hence independent of order and ranks."
PRE, MID, SUF = 47, 48, 49


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"ids": [r.randrange(40) for _ in range(r.randrange(4, 12))], "seed": 100 * seed + i} for i in range(12)]}


def right(rows, rate=0.5, spm=0.5):
    out = []
    for row in rows:
        rng, ids = random.Random(row["seed"]), list(row["ids"])
        if rng.random() < rate:
            a, b = sorted(rng.randrange(len(ids) + 1) for _ in range(2))
            prefix, middle, suffix = ids[:a], ids[a:b], ids[b:]
            if rng.random() < spm:
                ids = [PRE, SUF] + suffix + [MID] + prefix + middle
            else:
                ids = [PRE] + prefix + [SUF] + suffix + [MID] + middle
        out.append({"ids": ids, "labels": list(ids)})
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    kinds = {"plain": 0, "psm": 0, "spm": 0}
    for r, o in zip(rows, out):
        x = o["ids"]
        if x[0] != PRE:
            kinds["plain"] += 1
            assert x == r["ids"]
            continue
        s, m = x.index(SUF), x.index(MID)
        suffix, rest, prefix = x[s + 1:m], x[m + 1:], x[1:s]
        kinds["spm" if (s == 1 and rest + suffix == r["ids"]) else "psm"] += 1
        assert prefix + rest + suffix == r["ids"] and len(x) == len(r["ids"]) + 3
    print(kinds)
    assert right(rows) == out and sum(kinds.values()) == 12
