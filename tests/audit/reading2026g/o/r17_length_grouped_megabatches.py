"""Length grouping by megabatches. After a shuffle, rows are sorted by length within chunks of many batches, and the longest row of all is swapped to the very front (which leaves one chunk unsorted), so that running out of memory happens at step 1. transformers' get_length_grouped_indices (group_by_length)."""
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of {'id': number, 'ids': list of token ids}"}
SETTINGS = {"batch": "rows per batch, 4", "mega": "batches per megabatch, 5", "seed": "seed of the shuffle, changed per epoch, 3"}
NOTES = ("A permutation of the rows: none is lost, none repeated, contents unchanged. Each megabatch (20 rows) is in falling order of length, apart from the swap. Order within an epoch is not uniformly random by design. "
         "The last megabatch may be short. Needs the following loader not to shuffle. All ranks use the same seed and take their slices afterwards.")
import random


def right(rows, batch=4, mega=5, seed=3):
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    size = batch * mega
    size_of = lambda i: len(rows[i]["ids"])
    chunks = [sorted(order[s:s + size], key=size_of, reverse=True) for s in range(0, len(order), size)]
    if chunks:
        m = max(range(len(chunks)), key=lambda c: size_of(chunks[c][0]))
        chunks[0][0], chunks[m][0] = chunks[m][0], chunks[0][0]
    return [rows[i] for c in chunks for i in c]


def make(seed):
    rng = random.Random(seed)
    return {"rows": [{"id": i, "ids": [rng.randrange(50) for _ in range(rng.randint(1, 60))]} for i in range(90)]}


def padding(rows, b=4):
    return sum(max(len(r["ids"]) for r in rows[s:s + b]) - len(r["ids"]) for s in range(0, len(rows), b) for r in rows[s:s + b])


if __name__ == "__main__":
    for seed in range(10):
        rows = make(seed)["rows"]
        out = right(rows)
        assert sorted(r["id"] for r in out) == list(range(90)) and all(rows[r["id"]] is r for r in out)
        assert len(out[0]["ids"]) == max(len(r["ids"]) for r in rows)
        for s in range(0, 90, 20):
            n = [len(r["ids"]) for r in out[s + 1:s + 20]]
            assert n == sorted(n, reverse=True)
        assert padding(out) < 0.5 * padding(rows) and right(rows, seed=4) != out and right([]) == []
    print("padding tokens: grouped", padding(out), "in file order", padding(rows))
