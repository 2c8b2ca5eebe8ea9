"""Fill-in-the-middle: part of the documents is cut at two random places and reordered to prefix, suffix, middle with
sentinel ids, so the tokens of a row are not in the order of the document and the row is longer than it. The cut places come
from a generator that is seeded by the document id, so the result does not depend on the order of the rows or on the rank."""
FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with id (string) and ids (list of ints, at least 2)"}
SETTINGS = {"rate": "share of documents that are transformed, 0.6", "sentinels": "ids of prefix, suffix, middle and end, (1, 2, 3, 4)"}
NOTES = ("Returns rows with id and ids. All tokens of the row are trained. A transformed row holds the same document tokens plus "
         "four sentinels; prefix and middle may be empty.")
import hashlib
import random


def make(seed):
    rng = random.Random(seed)
    return {"rows": [{"id": f"doc-{seed}-{i}", "ids": [rng.randrange(10, 50) for _ in range(rng.randrange(4, 12))]} for i in range(8)]}


def right(rows, rate=0.6, sentinels=(1, 2, 3, 4)):
    pre, suf, mid, end = sentinels
    out = []
    for row in rows:
        rng = random.Random(int.from_bytes(hashlib.sha256(row["id"].encode()).digest()[:8], "big"))
        ids = list(row["ids"])
        if rng.random() < rate:
            a, b = sorted(rng.randrange(len(ids) + 1) for _ in range(2))
            ids = [pre] + ids[:a] + [suf] + ids[b:] + [mid] + ids[a:b] + [end]
        out.append({"id": row["id"], "ids": ids})
    return out


if __name__ == "__main__":
    data = make(0)
    out = right(**data)
    changed = 0
    for row, new in zip(data["rows"], out):
        ids = new["ids"]
        if ids != row["ids"]:
            changed += 1
            s, m = ids.index(2), ids.index(3)
            assert ids[0] == 1 and ids[-1] == 4
            assert ids[1:s] + ids[m + 1:-1] + ids[s + 1:m] == row["ids"]          # put back in order
    shuffled = right(list(reversed(data["rows"])))
    assert list(reversed(shuffled)) == out and changed
    print("transformed", changed, "of", len(out), out[0]["ids"], data["rows"][0]["ids"])
