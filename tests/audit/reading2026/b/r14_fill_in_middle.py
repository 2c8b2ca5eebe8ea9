"""Data stage that cuts each document in three and moves the middle to the end.
Right: fill-in-the-middle (prefix-suffix-middle order) for a share of the rows, chosen by a hash of the row's own id, so that the choice does not depend on order, rank or epoch. All tokens stay trained."""
import hashlib
import random

FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of dicts: id, tokens"}
SETTINGS = {"rate": "share of rows that are rearranged, 0.5", "sentinels": "prefix 1, suffix 2, middle 3"}
NOTES = "Output tokens are the same multiset plus three sentinels; the loss covers all tokens. Rows that are not chosen stay as they are."


def right(rows, rate=0.5, sentinels=(1, 2, 3)):
    out = []
    for r in rows:
        rng = random.Random(int(hashlib.sha256(str(r["id"]).encode()).hexdigest(), 16))
        t = r["tokens"]
        if len(t) < 3 or rng.random() >= rate:
            out.append(dict(r))
            continue
        a, b = sorted(rng.sample(range(len(t) + 1), 2))
        p, s, m = sentinels
        out.append({"id": r["id"], "tokens": [p] + t[:a] + [s] + t[b:] + [m] + t[a:b]})
    return out


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"id": f"{seed}-{k}", "tokens": [r.randrange(10, 50) for _ in range(r.randint(2, 12))]} for k in range(12)]}


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    moved = 0
    for r, o in zip(rows, out):
        t = o["tokens"]
        if t != r["tokens"]:
            moved += 1
            i, j = t.index(2), t.index(3)
            assert t[0] == 1 and t[1:i] + t[j + 1:] + t[i + 1:j] == r["tokens"]
    assert right(rows) == out and right(rows[::-1]) == out[::-1]
    print("rows", len(rows), "rearranged", moved)
    assert 0 < moved < len(rows)
