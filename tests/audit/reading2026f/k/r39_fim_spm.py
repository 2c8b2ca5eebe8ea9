"""Fill-in-the-middle data stage (Bavarian et al. 2022; SantaCoder). Half of the documents are re-ordered as suffix, prefix, middle (joint SPM) or prefix, suffix,
middle; all tokens stay, and the loss is on ALL of them. The choice depends on the document id, not on a running generator, so it is the same for any order or rank."""
import random

FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with id (string) and text (string)"}
SETTINGS = {"rate": "share of transformed documents, 0.5", "spm_rate": "share of SPM among them, 0.5", "seed": "0"}
NOTES = ("Row count, order and ids are kept; untransformed rows pass unchanged (the same dict is not mutated). PSM: <PRE>prefix<SUF>suffix<MID>middle. "
         "Joint SPM: <PRE><SUF>suffix<MID>prefix middle, in which prefix and middle stand together with no marker between (that is the paper's variant).")


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"id": f"doc{seed}-{i}", "text": "".join(r.choice("abcdefgh \n") for _ in range(r.randint(0, 40)))} for i in range(12)]}


def right(rows, rate=0.5, spm_rate=0.5, seed=0):
    out = []
    for row in rows:
        rng = random.Random(f"{seed}:{row['id']}")
        text = row["text"]
        if rng.random() < rate and text:
            a, b = sorted(rng.randint(0, len(text)) for _ in range(2))
            pre, mid, suf = text[:a], text[a:b], text[b:]
            if rng.random() < spm_rate:
                text = f"<PRE><SUF>{suf}<MID>{pre}{mid}"
            else:
                text = f"<PRE>{pre}<SUF>{suf}<MID>{mid}"
        out.append({**row, "text": text})
    return out


if __name__ == "__main__":
    kinds = {"plain": 0, "psm": 0, "spm": 0}
    for seed in range(60):
        rows = make(seed)["rows"]; out = right(rows)
        assert right(rows[::-1]) == out[::-1] and right(rows[3:7]) == out[3:7]
        for a, b in zip(rows, out):
            t = b["text"]
            if not t.startswith("<PRE>"):
                assert t == a["text"]; kinds["plain"] += 1; continue
            pre, rest = t[5:].split("<SUF>"); suf, mid = rest.split("<MID>")
            assert pre + mid + suf == a["text"]; kinds["spm" if t.startswith("<PRE><SUF>") else "psm"] += 1
    print(kinds)
