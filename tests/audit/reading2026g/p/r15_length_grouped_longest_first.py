"""Length-grouped order with the longest row first. A random permutation is cut into megabatches, each sorted by falling length, and the longest row of all is swapped to the very front so that an out-of-memory error shows at step 1 (HF get_length_grouped_indices)."""
import random
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of rows {'index': int, 'ids': list of token ids}"}
SETTINGS = {"batch": "rows per batch, 4", "mega": "batches per megabatch, 5", "seed": "seed of the permutation, 0"}
NOTES = "A pure permutation: same rows, none lost or repeated, the last megabatch may be short. Not uniform: lengths inside a batch are alike and the longest row always comes first; neither is a leak. Depends on the whole list. Rows themselves are unchanged. The batches made of it may be short at the end."
def make(seed):
    r = random.Random(seed)
    return {"rows": [{"index": i, "ids": [r.randrange(1, 50) for _ in range(r.randrange(1, 100))]} for i in range(70)]}
def right(rows, batch=4, mega=5, seed=0):
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    size = batch * mega
    blocks = [sorted(order[i:i + size], key=lambda j: len(rows[j]["ids"]), reverse=True) for i in range(0, len(order), size)]
    if blocks:
        best = max(range(len(blocks)), key=lambda b: len(rows[blocks[b][0]]["ids"]))
        blocks[0][0], blocks[best][0] = blocks[best][0], blocks[0][0]
    return [rows[j] for block in blocks for j in block]
if __name__ == "__main__":
    def waste(rs):
        return sum(max(len(r["ids"]) for r in rs[i:i + 4]) * len(rs[i:i + 4]) for i in range(0, len(rs), 4)) - sum(len(r["ids"]) for r in rs)
    for seed in range(20):
        rows = make(seed)["rows"]
        got = right(rows, seed=seed)
        assert sorted(r["index"] for r in got) == list(range(70))
        L = [len(r["ids"]) for r in got]
        assert L[0] == max(L) and waste(got) < 0.5 * waste(rows)
        assert all(L[i] >= L[i + 1] for b in range(0, 70, 20) for i in range(b + 1, min(b + 20, 70) - 1))
    assert right([]) == [] and [r["index"] for r in right(rows, seed=1)] != [r["index"] for r in right(rows, seed=2)]
    print("ok padding tokens: as given", waste(rows), "grouped", waste(got))
