"""Deterministic blending of datasets by largest deficit; small ones repeat. Megatron-LM's build_blending_indices.
At each position the dataset whose share is furthest behind weight * max(position, 1) is taken, without any random draw. A small dataset with a large weight wraps around, so its rows appear several times while the large one is not used up: wanted by the weights."""
FAMILY = "data"
KIND = "data stage"
INPUTS = {"rows": "list of rows: dicts with source (0..2) and id; all sources together, in order"}
SETTINGS = {"weights": "share of each source, (0.5, 0.3, 0.2)", "n": "rows to draw, 20"}
NOTES = "Returns n rows. Source counts differ from weight * n by at most about 1. Within a source the rows come in their order and start again after the last. The weights sum to 1. Duplicates are intended when weight * n exceeds the size of the source. Deterministic; no shuffling here."


def make(seed):
    sizes = (4, 15 + seed % 3, 10)
    return {"rows": [{"source": s, "id": 100 * s + i} for s, n in enumerate(sizes) for i in range(n)]}


def right(rows, weights=(0.5, 0.3, 0.2), n=20):
    pools = [[r for r in rows if r["source"] == s] for s in range(len(weights))]
    used, out = [0] * len(weights), []
    for k in range(n):
        deficit = [w * max(k, 1) - u for w, u in zip(weights, used)]
        s = deficit.index(max(deficit))
        out.append(pools[s][used[s] % len(pools[s])])
        used[s] += 1
    return out


if __name__ == "__main__":
    out = right(make(0)["rows"])
    print([r["id"] for r in out])
    for s, w in enumerate((0.5, 0.3, 0.2)):
        mine = [r["id"] for r in out if r["source"] == s]
        assert abs(len(mine) - w * 20) < 1 and mine == [100 * s + i % (4, 15, 10)[s] for i in range(len(mine))]
