"""Fill-in-the-middle: a document is cut in three at two character places and reordered as prefix-suffix-middle, or, half of the time, as the SPM variant in which the suffix comes first but the PRE and MID tokens stay together ('<PRE><SUF>suffix<MID>prefix middle'). The text is out of order, and the loss covers all of it (Bavarian et al. 2022)."""
import hashlib
import random

FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with 'id' (string) and 'text' (string)"}
SETTINGS = {"rate": "share of rows transformed, 0.9", "spm": "share of those in SPM order, 0.5"}
NOTES = "One row in, one row out, order kept. Randomness is keyed by the row's id only, so it does not depend on position, rank or worker. Rows shorter than 3 characters stay as they are. No character lost."
PRE, SUF, MID, EOT = "<PRE>", "<SUF>", "<MID>", "<EOT>"


def make(seed):
    rng = random.Random(seed)
    return {"rows": [{"id": f"doc{seed}-{i}", "text": "".join(rng.choice("abc de\n") for _ in range(rng.randint(0, 25)))} for i in range(40)]}


def right(rows, rate=0.9, spm=0.5):
    out = []
    for r in rows:
        rng = random.Random(int(hashlib.sha256(r["id"].encode()).hexdigest()[:16], 16))
        t = r["text"]
        if len(t) < 3 or rng.random() >= rate:
            out.append({**r, "text": t + EOT})
            continue
        a, b = sorted(rng.randint(0, len(t)) for _ in range(2))
        p, m, s = t[:a], t[a:b], t[b:]
        if rng.random() < spm:
            out.append({**r, "text": PRE + SUF + s + MID + p + m + EOT})
        else:
            out.append({**r, "text": PRE + p + SUF + s + MID + m + EOT})
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    kinds = {"plain": 0, "psm": 0, "spm": 0}
    for r, o in zip(rows, out):
        x = o["text"][:-len(EOT)]
        if not x.startswith(PRE):
            kinds["plain"] += 1
        else:
            head, m = x.split(MID)
            p, s = head[len(PRE):].split(SUF)
            kinds["spm" if head.startswith(PRE + SUF) and not (p or not s) else "psm"] += 1
            x = p + m + s
        assert x == r["text"] or head.startswith(PRE + SUF) and m + s == r["text"], (r, o)
    assert right(rows[::-1])[::-1] == out and right(rows[7:9]) == out[7:9]
    print("ok", kinds)
