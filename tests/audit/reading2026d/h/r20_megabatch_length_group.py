"""Length grouping within shuffled megabatches, with the longest row of all swapped into the very first place so that memory errors show at once (HF LengthGroupedSampler). Looks like a sort that breaks the shuffle; it is a permutation, random between megabatches."""
FAMILY = "data order"; KIND = "data stage"
INPUTS = {"rows": "list of dict len (int)"}
SETTINGS = {"batch": "4", "mega": "batches per megabatch, 3", "seed": "5"}
NOTES = "Permutation of the rows. Sorted by falling length in each megabatch except for the swapped pair. Depends on the seed."
import random
def make(seed):
    r = random.Random(seed); return {"rows": [{"id": i, "len": r.randrange(1, 100)} for i in range(29)]}
def right(rows, batch=4, mega=3, seed=5):
    idx = list(range(len(rows))); random.Random(seed).shuffle(idx); m = batch * mega
    megas = [sorted(idx[i:i + m], key=lambda j: rows[j]["len"], reverse=True) for i in range(0, len(idx), m)]
    if megas:
        k = max(range(len(megas)), key=lambda i: rows[megas[i][0]]["len"])
        megas[0][0], megas[k][0] = megas[k][0], megas[0][0]
    return [rows[j] for g in megas for j in g]
if __name__ == "__main__":
    rows = make(0)["rows"]; o = right(rows)
    assert sorted(r["id"] for r in o) == list(range(29)) and o[0]["len"] == max(r["len"] for r in rows)
    waste = lambda rs: sum(max(x["len"] for x in rs[i:i + 4]) * len(rs[i:i + 4]) - sum(x["len"] for x in rs[i:i + 4]) for i in range(0, len(rs), 4))
    print("padding", waste(o), "against", waste(rows)); assert waste(o) < waste(rows)
