"""Shuffle, slice, repeat: the subset changes in every epoch. google/grain#1200, https://github.com/google/grain/issues/1200, 2026.
dataset.shuffle()[:k].repeat(n) is meant to take a random subset of k rows and go over it n times. From v0.2.15 on, the repeat reseeds the
shuffle below the slice in every epoch, so that each epoch shows k other rows: rows which were held out (for validation) leak into training."""
FAMILY = "data stages, collators and chat templates"
KIND = "data stage"
INPUTS = {"rows": "list of {'id': int, 'ids': token ids}, the whole source"}
SETTINGS = {"subsample_size": "number of rows in the training subset, 4", "num_epochs": "passes over the subset, 5", "seed": "shuffle seed, 42"}
NOTES = """(rows) -> rows. A random subset of subsample_size rows is drawn once from the source (a permutation by `seed`, cut at subsample_size);
the rest of the source is held out and must never appear. The output is num_epochs passes over that one subset; every pass contains each
row of the subset exactly once, in an order which is newly shuffled for each pass (the first pass in the order of the draw).
The output has subsample_size * num_epochs rows. Rows are not changed."""
import random


def make(seed):
    r = random.Random(seed)
    return {"rows": [{"id": i, "ids": [r.randint(3, 40) for _ in range(r.randint(2, 5))]} for i in range(10)]}


def _perm(n, seed):
    p = list(range(n))
    random.Random(seed).shuffle(p)
    return p


def broken(rows, subsample_size=4, num_epochs=5, seed=42):
    out = []
    for epoch in range(num_epochs):
        order = _perm(len(rows), seed + epoch)[:subsample_size]
        out += [rows[i] for i in order]
    return out


def right(rows, subsample_size=4, num_epochs=5, seed=42):
    subset = [rows[i] for i in _perm(len(rows), seed)[:subsample_size]]
    out = list(subset)
    for epoch in range(1, num_epochs):
        out += [subset[i] for i in _perm(subsample_size, seed + epoch)]
    return out


if __name__ == "__main__":
    x = make(0)
    a, b = [r["id"] for r in broken(**x)], [r["id"] for r in right(**x)]
    print("broken", a, "distinct", len(set(a)))
    print("right ", b, "distinct", len(set(b)))
    assert a != b and len(set(b)) == 4 and all(sorted(b[i:i + 4]) == sorted(b[:4]) for i in range(0, 20, 4))
