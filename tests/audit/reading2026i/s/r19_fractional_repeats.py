"""Domain mixture with fractional repeats (Muennighoff et al. 2023, Dolma/OLMo mixes): high-quality domains are repeated up to 4 times, web text is thinned out. A row with weight 2.4 occurs twice and, for 40 % of the rows chosen by a hash of the row's id, a third time; weight 0.5 keeps every second row on average. Exact duplicates in the
result are on purpose; they get another 'epoch' number, so that the shuffle puts them apart."""
import hashlib

FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of {'id': string, 'domain': string, 'input_ids': ids}"}
SETTINGS = {"weights": "repeats per domain: wiki 2.4, web 0.5, code 1.0; other domains 1.0"}
NOTES = "Deterministic; independent of the order of rows and of the rank. Output: all first copies in input order, then all second copies, …; each with 'epoch'. Number of rows changes. Token ids are untouched."


def make(seed):
    import random
    r = random.Random(seed)
    return {"rows": [{"id": f"{seed}/{i}", "domain": ("wiki", "web", "web", "code")[i % 4], "input_ids": [r.randrange(50) for _ in range(4)]} for i in range(400)]}


def _uniform(text):
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2 ** 64


def right(rows, weights=None):
    weights = {"wiki": 2.4, "web": 0.5, "code": 1.0} if weights is None else weights
    keyed = []
    for place, row in enumerate(rows):
        w = weights.get(row["domain"], 1.0)
        copies = int(w) + (_uniform(row["id"]) < w - int(w))
        keyed += [(epoch, place, {**row, "epoch": epoch}) for epoch in range(copies)]
    return [row for _, _, row in sorted(keyed, key=lambda k: k[:2])]


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    share = {d: sum(o["domain"] == d for o in out) / sum(r["domain"] == d for r in rows) for d in ("wiki", "web", "code")}
    print("rows", len(rows), "->", len(out), "repeats", share)
    assert abs(share["wiki"] - 2.4) < 0.15 and abs(share["web"] - 0.5) < 0.1 and share["code"] == 1.0
    key = lambda o: (o["id"], o["epoch"])
    assert sorted(map(key, out)) == sorted(map(key, right(rows[::-1]))) and len(set(map(key, out))) == len(out)
