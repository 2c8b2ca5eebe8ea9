"""UniMax mixing: small sources are repeated up to a cap of epochs, large ones are cut (Chung et al., arXiv 2304.09151).
The budget is shared evenly over the sources, from the smallest on; a source that would need more than `max_epochs` passes gives its rest to the larger ones. So the
result has duplicates on purpose, drops rows of large sources, and is not in the proportions of the data."""
FAMILY = "data stages"
KIND = "data stage"
INPUTS = {"rows": "list of dicts with source (a name), id and ids"}
SETTINGS = {"budget": "rows to draw, 60", "max_epochs": "largest number of passes over a source, 4"}
NOTES = ("Out: a list of rows, sources in the order of their size (ties by name), each source in whole passes in its own order and a last partial pass. Every repeat is meant. If the cap binds for all sources, "
         "there are fewer rows than the budget. No shuffling here: the loader does it.")
import torch


def make(seed):
    g = torch.Generator().manual_seed(seed)
    rows, k = [], 0
    for name, n in (("web", 70), ("code", 12), ("latin", 3)):
        for _ in range(n):
            rows.append({"source": name, "id": k, "ids": torch.randint(1, 40, (4,), generator=g).tolist()})
            k += 1
    order = torch.randperm(len(rows), generator=g).tolist()
    return {"rows": [rows[i] for i in order]}


def right(rows, budget=60, max_epochs=4):
    sources = {}
    for row in rows:
        sources.setdefault(row["source"], []).append(row)
    names = sorted(sources, key=lambda n: (len(sources[n]), n))
    left, out = budget, []
    for i, name in enumerate(names):
        share = left // (len(names) - i)
        take = min(share, max_epochs * len(sources[name]))
        left -= take
        out += [sources[name][k % len(sources[name])] for k in range(take)]
    return out


if __name__ == "__main__":
    rows = make(0)["rows"]
    out = right(rows)
    count = {n: sum(r["source"] == n for r in out) for n in ("latin", "code", "web")}
    print(len(rows), "rows in,", len(out), "out", count)
    assert count == {"latin": 12, "code": 24, "web": 24} and len(out) == 60
    assert max(sum(r["id"] == i for r in out) for i in range(85)) == 4
