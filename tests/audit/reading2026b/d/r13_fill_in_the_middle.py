"""A data stage reorders the tokens of half of the rows and trains all of them.
Fill-in-the-middle: a row is cut at two places and becomes <pre> prefix <suf> suffix <mid> middle. Rows get longer by
three tokens, their text is no longer in reading order, and the choice comes from a hash of the row's
id, not from a random state, so it is the same in each epoch and on each worker."""
import hashlib
import random

FAMILY = 'data'
KIND = 'data stage'
INPUTS = {
    'rows': "list of {'id': string, 'ids': token ids}",
}
SETTINGS = {
    'rate': 'share of the rows that are rewritten, 0.5',
}
NOTES = (
    'Rewritten rows hold the same tokens in the order prefix, suffix, middle, with the three marker '
    'ids 1, 2, 3. Row order and number stay. Deterministic for each row, independent of its '
    'neighbours. '
)


PRE, SUF, MID = 1, 2, 3


def make(seed):
    g = random.Random(seed)
    return {"rows": [{"id": "%d-%d" % (seed, i), "ids": [g.randint(4, 49) for _ in range(g.randint(1, 12))]} for i in range(30)]}


def right(rows, rate=0.5):
    out = []
    for row in rows:
        h = int.from_bytes(hashlib.sha256(row["id"].encode()).digest()[:8], "big")
        ids = row["ids"]
        if (h % 10_000) / 10_000 >= rate or len(ids) < 3:
            out.append(dict(row))
            continue
        g = random.Random(h)
        a, b = sorted(g.sample(range(len(ids) + 1), 2))
        out.append({**row, "ids": [PRE] + ids[:a] + [SUF] + ids[b:] + [MID] + ids[a:b]})
    return out


def undo(ids):
    if ids[0] != PRE:
        return ids
    s, m = ids.index(SUF), ids.index(MID)
    return ids[1:s] + ids[m + 1:] + ids[s + 1:m]


if __name__ == "__main__":
    rows = make(0)["rows"]
    done = right(rows)
    assert [undo(r["ids"]) for r in done] == [r["ids"] for r in rows] and [r["id"] for r in done] == [r["id"] for r in rows]
    assert right(rows[7:8]) == done[7:8] and right(rows) == done
    changed = sum(a != b for a, b in zip(rows, done))
    print("rewritten", changed, "of", len(rows), "e.g.", next(b for a, b in zip(rows, done) if a != b)["ids"])
    assert 5 < changed < 25
