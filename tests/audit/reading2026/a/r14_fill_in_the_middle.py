"""Fill-in-the-middle: a part of the documents is permuted to prefix, suffix, middle before training.
The order of the tokens changes and three sentinels are added; nothing is lost. Documents shorter than 3 tokens and the
documents that the coin leaves alone pass unchanged. The coin is seeded by the document, not by its place in the list."""
import random
FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of {'ids': list of ids, 'key': number of the document}"}
SETTINGS = {"rate": "share of documents that are permuted, 0.5", "prefix_id": "40", "suffix_id": "41", "middle_id": "42"}
NOTES = "Returns rows in the same order; permuted rows are 3 tokens longer. All tokens stay trained, the sentinels too."

def make(seed):
    rng = random.Random(seed)
    return {"rows": [{"ids": [rng.randrange(5, 40) for _ in range(rng.randrange(1, 12))], "key": 100 * seed + i} for i in range(40)]}

def right(rows, rate=0.5, prefix_id=40, suffix_id=41, middle_id=42):
    out = []
    for row in rows:
        rng, ids = random.Random(row["key"]), row["ids"]
        if len(ids) < 3 or rng.random() >= rate:
            out.append(dict(row))
            continue
        a, b = sorted(rng.sample(range(len(ids) + 1), 2))
        out.append({**row, "ids": [prefix_id] + ids[:a] + [suffix_id] + ids[b:] + [middle_id] + ids[a:b]})
    return out

if __name__ == "__main__":
    d = make(0)
    out, changed = right(**d), 0
    for before, after in zip(d["rows"], out):
        ids = after["ids"]
        if ids[0] == 40:
            s, m = ids.index(41), ids.index(42)
            ids, changed = ids[1:s] + ids[m + 1:] + ids[s + 1:m], changed + 1
        assert ids == before["ids"]
    again = right(d["rows"][::-1])[::-1]
    print("permuted", changed, "of", len(out), "independent of the order:", again == out)
    assert 0 < changed < len(out) and again == out
