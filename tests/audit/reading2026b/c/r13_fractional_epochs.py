"""Rows are repeated a fractional number of times. A source with weight 2.3 gives each row twice, and 30 percent of its rows, chosen by a hash of the row, a third time; weight 0.4 keeps 40 percent. Duplicates in the output are
intended and the copies carry a number. Nothing is drawn at random, so the choice does not depend on order, rank or a seed."""
import hashlib
import random

FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "rows with id, source and text"}
SETTINGS = {"weights": "epochs of each source: web 0.4, books 2.3, code 1.0"}
NOTES = "Each row appears floor(weight) times, and once more when the hash of its id, mapped to [0, 1), is below the fraction of the weight. Copies have the field copy = 0, 1, 2. The order of rows is kept. Exact duplicates of text are intended."


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"id": f"{seed}-{i}", "source": r.choice(["web", "books", "code"]), "text": f"text {r.randrange(1000)}"} for i in range(300)]}


def unit(row_id):
    return int.from_bytes(hashlib.sha256(row_id.encode()).digest()[:8], "big") / 2 ** 64


def right(rows, weights=(("web", 0.4), ("books", 2.3), ("code", 1.0))):
    weights = dict(weights)
    out = []
    for row in rows:
        w = weights[row["source"]]
        n = int(w) + (unit(row["id"]) < w - int(w))
        out += [{**row, "copy": k} for k in range(n)]
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    for s, w in (("web", 0.4), ("books", 2.3), ("code", 1.0)):
        a, b = sum(r["source"] == s for r in rows), sum(r["source"] == s for r in out)
        print(s, "rows", a, "after", b, "ratio", round(b / a, 3), "wanted", w)
        assert abs(b / a - w) < 0.12
    shuffled = rows[::-1]
    assert sorted((r["id"], r["copy"]) for r in right(shuffled)) == sorted((r["id"], r["copy"]) for r in out)
